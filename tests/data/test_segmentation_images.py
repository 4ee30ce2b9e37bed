"""Images with masks: crops for training, whole images for evaluation, and files that cannot be used."""

import traceback

import numpy as np
import pytest
import torch
from PIL import Image

from progresvit.config import ModelConfig, make_rounds
from progresvit.data.augment.segmentation import AugmentPairs, SegmentationAugmentation
from progresvit.data.loading import Unreadable
from progresvit.data.sampler import EpochSampler
from progresvit.data.segmentation import IGNORE, find_segmentation
from progresvit.data.segmentation.images import evaluation_image, evaluation_images
from progresvit.data.segmentation.sources import pairs_in_memory, segmentation_from_workers
from progresvit.data.segmentation.windows import WindowOptions, views_of
from progresvit.data.sources import InMemorySource
from progresvit.data.transforms import normalise
from tests.data.shapes import SIZES, draw_shape, save_pair, save_shapes

CPU = torch.device("cpu")
CONFIG = ModelConfig(rounds=make_rounds([32, 48], [1, 2]), heads=2, depth=2, num_classes=3, task="segmentation")
PLAIN = SegmentationAugmentation(scale=(1.0, 1.0), flip=0.0, photometric=False)
FULL = SegmentationAugmentation()


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """No test may change it."""
    return find_segmentation(save_shapes(tmp_path_factory.mktemp("shapes")), "train")


def loader(dataset, augmentation=FULL, workers=0, batch=8, **order):
    sampler = EpochSampler(count=len(dataset), batch=batch, **order)
    settings = {"config": CONFIG, "augmentation": augmentation, "workers": workers, "device": CPU}
    return segmentation_from_workers(dataset, sampler, **settings)


def in_memory(dataset, augmentation=FULL, batch=8, side=64, **order):
    stored = pairs_in_memory(dataset, config=CONFIG, side=side, device=CPU)
    sampler = EpochSampler(count=len(stored), batch=batch, **order)
    return InMemorySource(stored, sampler, AugmentPairs(CONFIG, augmentation, device=CPU))


def evaluated(dataset, indices=None, *, options=WindowOptions(), workers=0, unreadable=None):  # noqa: B008
    indices = range(len(dataset)) if indices is None else indices
    unreadable = Unreadable(dataset) if unreadable is None else unreadable
    settings = {"config": CONFIG, "options": options, "workers": workers, "unreadable": unreadable}
    return dict(evaluation_images(dataset, indices, **settings))


@pytest.mark.parametrize("make", [loader, in_memory])
def test_batches_are_crops_with_the_labels_of_their_pixels(shapes, make):
    for step in make(shapes, accumulate=2).steps(0, 6):
        assert len(step) == 2
        for images, masks in step:
            assert (images.shape, images.dtype) == ((4, 3, 48, 48), torch.float32)
            assert (masks.shape, masks.dtype) == ((4, 48, 48), torch.int64)
            assert set(masks.unique().tolist()) <= {0, 1, 2, IGNORE}
            labelled = masks != IGNORE
            assert labelled.any()
            red, _, blue = (images * torch.tensor(CONFIG.std).view(1, 3, 1, 1)).unbind(1)
            for label, sign in ((1, 1), (2, -1)):  # the labels mean the same classes in both ways
                if (masks == label).sum() > 200:
                    assert sign * (red - blue)[masks == label].median() > 0.1


def test_without_augmentation_both_ways_give_the_pairs_themselves(tmp_path):
    dataset = find_segmentation(save_shapes(tmp_path, train=8, val=0, sizes=[(48, 48)]), "train")
    for first, second in zip(loader(dataset, PLAIN).steps(0, 2), in_memory(dataset, PLAIN, side=48).steps(0, 2)):
        assert torch.equal(first[0].masks, second[0].masks)
        assert torch.allclose(first[0].images, second[0].images, atol=1e-5)
    ((_, indices),) = EpochSampler(count=8, batch=8).micro_batches(1)
    for image, mask, index in zip(*first[0], indices):
        pixels, labels = dataset.read_pair(index)
        assert torch.equal(mask, torch.from_numpy(labels).long())
        expected = normalise(torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None], CONFIG)[0]
        assert torch.allclose(image, expected, atol=1e-5)


@pytest.mark.parametrize("make", [loader, in_memory])
def test_an_image_is_cropped_anew_in_every_epoch(shapes, make):
    epochs = [step[0].masks for step in make(shapes, batch=len(shapes)).steps(0, 3)]
    for index in range(len(shapes)):
        orders = ([indices for _, indices in EpochSampler(count=24, batch=24).micro_batches(step)] for step in range(3))
        seen = [masks[order.index(index)] for masks, (order,) in zip(epochs, orders)]
        assert len({tuple(mask.flatten().tolist()) for mask in seen}) == 3


def test_workers_do_not_change_whole_images(shapes):
    here, there = (evaluated(shapes, [7, 2, 3], workers=workers) for workers in (0, 1))
    assert list(here) == list(there) == [7, 2, 3]
    for first, second in zip(here.values(), there.values()):
        assert (first.views, first.size) == (second.views, second.size)
        assert torch.equal(first.pixels[0], second.pixels[0])
        assert torch.equal(first.mask, second.mask)


def test_images_in_memory_are_squeezed_and_remember_their_shape(shapes):
    stored = pairs_in_memory(shapes, config=CONFIG, side=40, device=CPU)
    assert len(stored) == 24
    assert (stored.images.shape, stored.targets.shape) == ((24, 3, 40, 40), (24, 40, 40))
    assert (stored.images.dtype, stored.targets.dtype) == (torch.uint8, torch.uint8)
    assert [tuple(size) for size in stored.sizes.tolist()] == [(height, width) for width, height in SIZES] * 6
    assert set(stored.targets.unique().tolist()) == {0, 1, 2, IGNORE}


def test_whole_images_keep_their_shape_and_their_mask(shapes):
    options = WindowOptions(stride=0.5, scales=(1.0, 1.5), flip=True)
    for index, whole in evaluated(shapes, options=options).items():
        pixels, mask = shapes.read_pair(index)
        height, width = mask.shape
        assert whole.size == (height, width)
        assert (whole.mask.dtype, whole.mask.tolist()) == (torch.uint8, mask.tolist())
        assert whole.views == views_of(height, width, 48, options)
        assert [tuple(scaled.shape[1:]) for scaled in whole.pixels] == [(v.height, v.width) for v in whole.views[::2]]
        assert {scaled.dtype for scaled in whole.pixels} == {torch.uint8}
        cut = whole.cut(CONFIG, CPU)
        assert cut.windows.shape == (sum(view.count for view in whole.views), 3, 48, 48)
        assert (cut.views, cut.size) == (whole.views, whole.size)
        resized = np.array(pixels.resize((whole.views[0].width, whole.views[0].height), Image.Resampling.BICUBIC))
        first = torch.from_numpy(resized[:48, :48]).permute(2, 0, 1)[None]
        assert torch.equal(cut.windows[:1], normalise(first, CONFIG))
        mirrored = sum(view.count for view in whole.views[:1])
        last = torch.from_numpy(resized[:48, ::-1][:, :48].copy()).permute(2, 0, 1)[None]
        assert torch.equal(cut.windows[mirrored : mirrored + 1], normalise(last, CONFIG))


def test_an_image_without_labels_can_be_evaluated():
    image, _ = draw_shape(0, (60, 48))
    whole = evaluation_image(image, None, CONFIG, WindowOptions(), "it").to(CPU)
    assert whole.mask is None
    assert whole.cut(CONFIG, CPU).windows.shape == (2, 3, 48, 48)


WAYS = {
    "loader": lambda dataset, workers=0: list(loader(dataset, workers=workers).steps(0, len(dataset) // 8)),
    "in_memory": lambda dataset, workers=0: in_memory(dataset),
    "evaluation": lambda dataset, workers=0: evaluated(dataset, workers=workers),
}


@pytest.fixture
def folder(tmp_path):
    """Sixteen pairs that a test may change."""
    return save_shapes(tmp_path / "shapes", train=16, val=0)


def text_of(error):
    """Also frees the error's frames, so that workers end now: a garbage collection would wait 5 s for each later."""
    traceback.clear_frames(error.tb)
    return str(error.value)


@pytest.mark.parametrize(("way", "workers"), [("loader", 0), ("loader", 1), ("in_memory", 0), ("evaluation", 1)])
def test_a_wrong_mask_is_an_error_that_names_the_file(folder, way, workers):
    """From a worker process too, where an exception would bring the worker's traceback in its message."""
    path = folder / "annotations" / "train" / "05.png"
    Image.fromarray(np.full((48, 72), 9, np.uint8)).save(path)
    with pytest.raises(ValueError, match=r"^the mask \S*annotations/train/05\.png has pixels of value 9, ") as error:
        WAYS[way](find_segmentation(folder, "train"), workers)
    text = text_of(error)
    assert "Traceback" not in text
    assert "DataLoader" not in text
    assert "\n" not in text


@pytest.mark.parametrize(("way", "workers"), [("loader", 1), ("in_memory", 0), ("evaluation", 0), ("evaluation", 1)])
@pytest.mark.parametrize("size", [(15, 40), (200, 8)])
def test_an_image_smaller_than_a_patch_is_refused_by_name(folder, way, workers, size):
    save_pair(folder, "train/03", *draw_shape(3, size))
    width, height = size
    expected = rf"^images/train/03\.png is smaller than a patch of 16 pixels \({width} x {height}\); leave it out"
    with pytest.raises(ValueError, match=expected) as error:
        WAYS[way](find_segmentation(folder, "train"), workers)
    assert "Traceback" not in text_of(error)


@pytest.mark.parametrize(("workers", "scales"), [(0, (1.0,)), (1, (1.0,)), (0, (1.0, 1.5))])
def test_an_image_too_long_and_thin_for_windows_is_refused_by_name(folder, workers, scales, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 48 * 48 * (20 if scales == (1.0,) else 40))
    save_pair(folder, "train/03", *draw_shape(3, (16, 16 * 24)))
    expected = r"^images/train/03\.png is too long and thin to be resized safely \(16 x 384\); leave it out"
    dataset = find_segmentation(folder, "train")
    with pytest.raises(ValueError, match=expected):
        evaluated(dataset, options=WindowOptions(scales=scales), workers=workers)
    assert WAYS["loader"](dataset)  # crops of it are small


def test_an_image_of_one_patch_is_taken(folder):
    save_pair(folder, "train/03", *draw_shape(3, (16, 16)))
    dataset = find_segmentation(folder, "train")
    for way in WAYS.values():
        way(dataset)
    assert evaluated(dataset, [3])[3].pixels[0].shape == (3, 48, 48)


@pytest.fixture
def damaged(folder):
    (folder / "images" / "train" / "04.png").write_bytes(b"not an image")
    (folder / "images" / "train" / "05.png").write_bytes(b"")
    return find_segmentation(folder, "train")


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_leaves_unreadable_images_out_and_keeps_the_numbers_of_the_others(damaged, workers, monkeypatch):
    monkeypatch.setattr(Unreadable, "limit", 0.2)
    unreadable = Unreadable(damaged)
    whole = evaluated(damaged, range(1, 16, 2), workers=workers, unreadable=unreadable)
    assert list(whole) == [1, 3, 7, 9, 11, 13, 15]
    assert unreadable.lines()[0].startswith("images/train/05.png: ")
    assert whole[7].mask.tolist() == damaged.read_mask(7).tolist()


def test_evaluation_stops_with_more_than_one_unreadable_image_in_a_hundred(damaged):
    with pytest.raises(ValueError, match=r"of 16 images cannot be read, more than 1%: images/train/0[45]\.png"):
        evaluated(damaged)
