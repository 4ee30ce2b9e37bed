"""Copies have the same hash, and images that differ in a single value, or only in their shape, have another."""

import torch

from progresvit.data.image_hash import image_hash
from tests.factories import random_pixels


def test_one_changed_value_changes_the_hash_and_a_copy_does_not():
    image = random_pixels(1)
    changed = image.repeat(image.numel(), 1, 1, 1)
    changed.view(len(changed), -1).diagonal().add_(128)  # another value in each: the highest bit alone
    hashes = image_hash(torch.cat([image, changed]))
    assert len(hashes.unique()) == 1 + image.numel()
    assert torch.equal(image_hash(torch.cat([changed[7:9], image])), torch.cat([hashes[8:10], hashes[:1]]))


def test_plain_images_of_other_shapes_differ():
    shapes = [(1, 4, 4), (1, 2, 8), (1, 8, 2), (3, 5, 7), (3, 7, 5), (1, 1, 1)]
    hashes = [image_hash(torch.zeros(2, *shape, dtype=torch.uint8)) for shape in shapes]
    assert len(torch.cat(hashes).unique()) == len(shapes)


def test_images_that_differ_in_the_highest_bits_alone_do_not_collide():
    images = torch.zeros(20_000, 1, 4, 16, dtype=torch.uint8)
    values = torch.arange(20_000)
    for word in range(15):  # only the last byte of each word
        images[:, 0].flatten(1)[:, 4 * word + 3] = ((values >> word) % 2 * 255).to(torch.uint8)
    assert len(image_hash(images).unique()) == 20_000
