"""Augmentation of images and masks: both show the same places, and colours change as in the SSD's distortion.

The images tell where each of their pixels was: red grows with the column, green with the row.
"""

import colorsys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest
from torchvision.transforms.v2.functional import adjust_brightness, adjust_hue

from progresvit.data.augment.gpu_augment import change_hue_and_saturation
from progresvit.data.augment.segmentation import (
    AugmentPairs,
    SegmentationAugmentation,
    crop_masks,
    distort,
    is_varied,
    sample_boxes,
)
from progresvit.data.segmentation import IGNORE
from tests.factories import tiny_config

SIDE = 32
BLOCK = 8
"""Side of the squares of one class, in stored pixels."""
LIFTED = tiny_config((16, SIDE), num_classes=3, mean=(-1,) * 3, std=(1,) * 3)
"""A model with a normalisation after which only padding is 0."""


def ramps(height, width):
    """(3, H, W) bytes; the blue channel is flat."""
    rows, columns = (torch.arange(length) + 0.5 for length in (height, width))
    red, green = (columns / width).expand(height, -1), (rows / height)[:, None].expand(-1, width)
    return (torch.stack([red, green, torch.full((height, width), 0.5)]) * 255).round().byte()


def blocks(height, width):
    """(H, W) bytes: a class for each square."""
    rows, columns = (torch.arange(length) // BLOCK for length in (height, width))
    return (rows[:, None] * -(-width // BLOCK) + columns).byte()


def crops(stored, sizes, seed=0, device="cpu", **options):
    """Crops of as many equal images as there are original sizes: pixels in 0..1 where there are any, and masks."""
    height, width = stored
    augmentation = SegmentationAugmentation(**{"photometric": False, **options})
    images, masks = AugmentPairs(LIFTED, augmentation, device=torch.device(device))(
        ramps(height, width).expand(len(sizes), -1, -1, -1).to(device),
        torch.tensor(sizes, device=device),
        blocks(height, width).expand(len(sizes), -1, -1).to(device),
        seed,
    )
    return images.cpu(), masks.cpu()


def check_one(image, mask, stored, size, scale, flip):
    """A crop (3, r, r) with its labels (r, r), of an image of this original size."""
    (height, width), box = stored, min(size) / scale
    step = box / SIDE * height / size[0], box / SIDE * width / size[1]  # stored pixels per row and per column
    padding = (image == 0).all(dim=0)
    assert torch.equal(mask == IGNORE, padding)
    inside = ~padding.all(dim=1), ~padding.all(dim=0)
    assert torch.equal(~padding, inside[0][:, None] & inside[1])  # a rectangle
    for kept, length in zip(inside, size):
        assert abs(kept.sum() - min(SIDE, SIDE * length / box)) <= 0.501
    decoded = (image[1] - 1) * height, (image[0] - 1) * width
    per_row = -(-width // BLOCK)
    named = mask // per_row, mask % per_row
    noise = [0.6 * length / 255 + 1e-3 for length in stored]  # of the bytes
    places = torch.arange(SIDE)[:, None], torch.arange(SIDE)[None, :]
    for axis in range(2):
        count = int(inside[axis].sum())
        first = 0 if axis == 0 or not flip else SIDE - count
        place = (places[axis] - first).expand(SIDE, SIDE)
        margin = torch.minimum(place, count - 1 - place)  # rows or columns from the border of what is shown
        reach = 2 * max(1.0, 1 / step[axis])  # of the kernel, in rows or columns
        error = torch.maximum(named[axis] * BLOCK - decoded[axis], decoded[axis] - (named[axis] + 1) * BLOCK)
        allowed = torch.where(margin > reach, noise[axis], noise[axis] + 1 + step[axis])
        assert (error[~padding] <= allowed[~padding]).all()
        # the distance of two rows or columns: the crop is a square of the original, of the size that was asked for
        line = decoded[axis].mT if axis == 0 else decoded[axis]
        line = line[~padding.mT if axis == 0 else ~padding].view(-1, count).mean(dim=0)
        edge = int(reach) + 1
        if count - 2 * edge > 4:
            result = (line[count - 1 - edge] - line[edge]) / (count - 1 - 2 * edge)
            expected = -step[axis] if axis == 1 and flip else step[axis]
            assert abs(result - expected) <= 2 * noise[axis] / (count - 1 - 2 * edge)


def check_all(images, masks, stored, sizes, *, scale, flip):
    for image, mask, size in zip(images, masks, sizes, strict=True):
        check_one(image, mask, stored, size, scale, flip)


LENGTHS = st.integers(24, 90)
SHAPES = st.tuples(LENGTHS, LENGTHS) | LENGTHS.map(lambda side: (side, side))
SCALES = st.floats(0.5, 2)


@settings(deadline=None, max_examples=150)
@given(SHAPES, st.lists(SHAPES, min_size=1, max_size=3), st.booleans(), SCALES, st.booleans(), st.integers(0, 10**6))
def test_image_and_mask_stay_aligned_under_every_augmentation(stored, others, squeezed, scale, flip, seed):
    sizes = others if squeezed else [stored] * 2
    images, masks = crops(stored, sizes, seed, scale=(scale, scale), flip=float(flip))
    assert (images.shape, masks.shape) == ((len(sizes), 3, SIDE, SIDE), (len(sizes), SIDE, SIDE))
    assert (images.dtype, masks.dtype) == (torch.float32, torch.int64)
    check_all(images, masks, stored, sizes, scale=scale, flip=flip)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.5, 0.8, 1.0, 2.0])
def test_image_and_mask_stay_aligned_on_a_gpu(scale):
    sizes = [(60, 90), (90, 60), (64, 64)]
    images, masks = crops((64, 80), sizes, device="cuda", scale=(scale, scale), flip=1.0)
    check_all(images, masks, (64, 80), sizes, scale=scale, flip=True)


def test_the_check_of_the_alignment_finds_half_a_pixel():
    """At this scale a column is half a stored pixel; a mask that is one column off, or not flipped, is noticed."""
    size = (SIDE, SIDE)
    images, masks = crops(size, [size] * 8, scale=(2.0, 2.0), flip=0.0)
    for shifted in (masks.roll(1, dims=1), masks.roll(-1, dims=2), masks.flip(2)):
        with pytest.raises(AssertionError):
            check_all(images, shifted, size, [size] * 8, scale=2.0, flip=False)


def test_masks_are_never_interpolated():
    """Not even between 0 and 7, or beside ignored pixels."""
    generator = torch.Generator().manual_seed(0)
    masks = torch.tensor([0, 7, IGNORE], dtype=torch.uint8)[torch.randint(3, (16, 50, 70), generator=generator)]
    result = AugmentPairs(LIFTED, SegmentationAugmentation(), device=torch.device("cpu"))(
        torch.full((16, 3, 50, 70), 200, dtype=torch.uint8),
        torch.tensor([(50, 70)] * 8 + [(90, 31)] * 8),
        masks,
        seed=0,
    )
    assert result[1].unique().tolist() == [0, 7, IGNORE]
    shown = (result[0] != 0).all(dim=1)
    assert (result[1][~shown] == IGNORE).all()
    assert 0.2 < (result[1][shown] == IGNORE).float().mean() < 0.5  # ignored in the mask itself


def test_a_mask_of_the_size_of_the_crop_stays_as_it_is():
    masks = torch.randint(0, 150, (2, SIDE, SIDE), dtype=torch.uint8)
    boxes = torch.tensor([[0.0, 0.0, SIDE, SIDE]] * 2)
    result = crop_masks(masks, boxes, torch.tensor([False, True]), side=SIDE)
    assert torch.equal(result, torch.stack([masks[0], masks[1].flip(1)]))


def test_boxes_are_squares_of_the_original_image_at_any_place():
    sizes = torch.tensor([(100, 300), (300, 100), (200, 200)]).repeat_interleave(2000, dim=0)
    boxes = sample_boxes(sizes, (0.5, 2.0), torch.Generator().manual_seed(0))
    top, left, height, width = boxes.unbind(1)
    assert torch.equal(height, width)
    scale = sizes.amin(dim=1) / height
    assert kstest(scale.numpy(), "uniform", (0.5, 1.5)).pvalue > 1e-4
    for start, length in ((top, sizes[:, 0]), (left, sizes[:, 1])):
        room = length - height
        assert (start[room <= 0] == 0).all()
        assert kstest((start / room)[room > 0].numpy(), "uniform").pvalue > 1e-4


def test_images_of_a_batch_are_drawn_one_by_one_and_all_follow_from_the_seed():
    sizes = [(64, 90)] * 8
    images, masks = crops((64, 90), sizes, seed=3, photometric=True)
    assert all(not torch.equal(images[a], images[b]) for a in range(8) for b in range(a))
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 8
    again = crops((64, 90), sizes, seed=3, photometric=True)
    assert torch.equal(again[0], images)
    assert torch.equal(again[1], masks)
    assert not torch.equal(crops((64, 90), sizes, seed=4)[1], masks)


def test_flips_have_their_probability():
    for flip in (0.0, 0.3, 1.0):
        images, _ = crops((32, 32), [(32, 32)] * 1000, scale=(1.0, 1.0), flip=flip)
        share = (images[:, 0, 0, 0] > images[:, 0, 0, -1]).float().mean()
        assert abs(share - flip) < 0.05


def test_photometric_distortion_does_not_move_anything():
    sizes = [(64, 90), (90, 64), (50, 50), (64, 90)]
    plain, distorted = (crops((64, 90), sizes, seed=5, photometric=flag) for flag in (False, True))
    assert torch.equal(plain[1], distorted[1])
    assert torch.equal(plain[0] == 0, distorted[0] == 0)
    assert not torch.equal(plain[0], distorted[0])
    images = torch.rand(6, 3, 8, 8)
    order = torch.randperm(64)

    def shuffled(batch):
        return batch.flatten(2)[..., order].view_as(batch)

    result, moved = (distort(batch, torch.Generator().manual_seed(0)) for batch in (images, shuffled(images)))
    assert torch.equal(moved, shuffled(result))


def test_distorted_pixels_stay_between_zero_and_one():
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 0.5, 1.0])] * 3).T.view(1, 3, 3, 9)
    result = distort(torch.cat([corners.expand(500, -1, -1, -1), torch.rand(500, 3, 3, 9)]), torch.Generator())
    assert result.isfinite().all()
    assert result.min() == 0
    assert result.max() == 1
    assert not torch.equal(result[0], result[1])


@pytest.fixture
def colours():
    """Random pixels, greys and pure colours: (1, 3, 20, 20)."""
    images = torch.rand(1, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    images[..., 0, :] = images[:, :1, 0, :]
    images[..., 1, :8] = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3).T
    return images


@pytest.mark.parametrize("hue", [-0.5, -0.1, -0.03, 0.0, 0.05, 0.1, 0.4])
def test_hue_turns_as_in_torchvision(colours, hue):
    result = change_hue_and_saturation(colours, torch.tensor([hue]), torch.tensor([1.0]))
    assert torch.allclose(result, adjust_hue(colours, hue), atol=1e-5)


@pytest.mark.parametrize("saturation", [0.0, 0.5, 0.9, 1.0, 1.3, 1.5])
def test_saturation_changes_as_in_hsv(colours, saturation):
    result = change_hue_and_saturation(colours, torch.tensor([0.0]), torch.tensor([saturation]))
    for pixel, expected in zip(result[0].flatten(1).T.tolist(), colours[0].flatten(1).T.tolist()):
        h, s, v = colorsys.rgb_to_hsv(*expected)
        assert pixel == pytest.approx(colorsys.hsv_to_rgb(h, min(1.0, s * saturation), v), abs=1e-5)


def test_each_image_has_its_own_hue_and_saturation(colours):
    hue, saturation = torch.tensor([0.1, -0.05, 0.0]), torch.tensor([1.2, 0.6, 1.0])
    together = change_hue_and_saturation(colours.expand(3, -1, -1, -1), hue, saturation)
    for index in range(3):
        alone = change_hue_and_saturation(colours, hue[index : index + 1], saturation[index : index + 1])
        assert torch.equal(together[index], alone[0])


def test_distortions_are_drawn_as_in_the_ssd():
    """Brightness ± 32 of 255 is added, contrast multiplies, hue turns by ± 18 of OpenCV's 180; each for every second.

    Two greys tell brightness and contrast, which is torchvision's brightness; a colour then tells hue and saturation.
    """
    count, colour = 2000, np.array([0.5, 0.35, 0.3])
    image = torch.tensor([[0.4] * 3, [0.5] * 3, colour.tolist()]).T.view(1, 3, 1, 3)
    result = distort(image.expand(count, -1, -1, -1).float(), torch.Generator().manual_seed(0))
    result = result[:, :, 0].double().numpy()
    contrast = (result[:, 0, 1] - result[:, 0, 0]) / 0.1
    brightness = result[:, 0, 0] / contrast - 0.4
    hue, saturation = np.empty(count), np.empty(count)
    for index in range(count):
        before = colorsys.rgb_to_hsv(*(colour + brightness[index]))
        after = colorsys.rgb_to_hsv(*(result[index, :, 2] / contrast[index]))
        hue[index] = (after[0] - before[0] + 0.5) % 1 - 0.5
        saturation[index] = after[1] / before[1]
        assert after[2] == pytest.approx(before[2], abs=1e-5)
    moved = []
    for values, neutral, low, high in (
        (brightness, 0, -32 / 255, 32 / 255),
        (contrast, 1, 0.5, 1.5),
        (hue, 0, -0.1, 0.1),
        (saturation, 1, 0.5, 1.5),
    ):
        changed = np.abs(values - neutral) > 1e-4
        assert abs(changed.mean() - 0.5) < 0.05
        assert kstest(values[changed], "uniform", (low, high - low)).pvalue > 1e-4
        moved.append(changed)
    assert len({tuple(row) for row in np.stack(moved, axis=1).tolist()}) == 16  # independent of each other
    only = moved[1] & ~moved[0] & ~moved[2] & ~moved[3]
    for index in np.flatnonzero(only)[:20]:
        expected = adjust_brightness(image[0].float(), contrast[index])
        assert result[index] == pytest.approx(expected[:, 0].numpy(), abs=1e-5)


@pytest.mark.parametrize("scale", [(2.0, 0.5), (0.0, 1.0), (-1.0, 1.0)])
def test_a_range_of_scales_that_does_not_ascend_is_refused(scale):
    with pytest.raises(ValueError, match="a range must go from small to large, both above 0"):
        SegmentationAugmentation(scale=scale)


def nearest_crop(mask, top, left, box):
    """The crop of a mask, pixel by pixel; IGNORE outside of it."""
    crop = np.full((SIDE, SIDE), IGNORE)
    for i, j in np.ndindex(SIDE, SIDE):
        row, column = int(top + (i + 0.5) / SIDE * box), int(left + (j + 0.5) / SIDE * box)
        if row < mask.shape[0] and column < mask.shape[1]:
            crop[i, j] = mask[row, column]
    return crop


def is_taken(crop, ratio):
    """As mmsegmentation decides it: two classes or more, none of them too large."""
    labels, counts = np.unique(crop, return_counts=True)
    counts = counts[labels != IGNORE]
    return len(counts) > 1 and counts.max() / counts.sum() < ratio


def test_crops_with_one_large_class_are_drawn_again_as_in_mmsegmentation():
    """Ten crops are looked at; if none of them is taken, the eleventh is, whatever it shows."""
    height, width, ratio, count, box = 48, 64, 0.75, 24, 24.0
    corner = np.zeros((height, width), np.uint8)  # few crops show more of the other classes than a quarter
    corner[:16, :20], corner[30:, 50:] = 7, IGNORE
    rows, columns = np.indices((height, width))
    patterns = [corner, (rows // 4 + columns // 4) % 5, np.full((height, width), 3), np.full((height, width), IGNORE)]
    masks = np.stack([patterns[number % 4] for number in range(count)]).astype(np.uint8)
    augmentation = SegmentationAugmentation(scale=(2.0, 2.0), flip=0.0, photometric=False, cat_max_ratio=ratio)
    result = AugmentPairs(LIFTED, augmentation, device=torch.device("cpu"))(
        torch.zeros(count, 3, height, width, dtype=torch.uint8),
        torch.tensor([(height, width)] * count),
        torch.from_numpy(masks),
        seed=0,
    )
    generator = torch.Generator().manual_seed(0)
    torch.rand(count, generator=generator)  # of the scale
    places = [[torch.rand(count, generator=generator).tolist() for _ in range(2)] for _ in range(11)]
    turns = []
    for number in range(count):
        drawn = [(down[number] * (height - box), right[number] * (width - box)) for down, right in places]
        seen = [nearest_crop(masks[number], top, left, box) for top, left in drawn]
        turns.append(next((turn for turn in range(10) if is_taken(seen[turn], ratio)), 10))
        assert result.masks[number].tolist() == seen[turns[-1]].tolist()
    assert len({*turns[0::4]}) > 2  # the corner is found at once, or later
    assert {*turns[1::4]} == {0}
    assert {*turns[2::4]} == {*turns[3::4]} == {10}


def test_without_a_ratio_the_first_crop_is_taken():
    sizes, masks = [(64, 90)] * 8, crops((64, 90), [(64, 90)] * 8, seed=3)[1]
    assert torch.equal(crops((64, 90), sizes, seed=3, cat_max_ratio=1.0)[1], masks)
    assert not torch.equal(crops((64, 90), sizes, seed=3, cat_max_ratio=0.01)[1], masks)


@pytest.mark.parametrize("ratio", [0.0, -0.5, 1.5])
def test_a_ratio_that_is_no_share_is_refused(ratio):
    with pytest.raises(ValueError, match="cat_max_ratio"):
        SegmentationAugmentation(cat_max_ratio=ratio)


@pytest.mark.gpu
def test_looking_for_a_large_class_does_not_wait_for_the_gpu():
    masks = torch.stack([blocks(64, 80), torch.full((64, 80), 3, dtype=torch.uint8)])
    on_gpu = masks.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        taken = is_varied(on_gpu, 0.75)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert taken.tolist() == is_varied(masks, 0.75).tolist() == [True, False]
