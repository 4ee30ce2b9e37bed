"""Sliding windows: where they lie, and how their logits become one map."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from progresvit.config import ModelConfig, make_rounds
from progresvit.data.segmentation import windows
from progresvit.data.segmentation.windows import (
    View,
    WindowOptions,
    describe_windows,
    label_map,
    upsampled_argmax,
    views_of,
    windows_hash,
)

SIDE = 12
GRID = 3
PLAIN = WindowOptions()
CONFIG = ModelConfig(rounds=make_rounds([32, 48], [1, 2]), heads=2, depth=1, num_classes=3, task="segmentation")

LENGTHS = st.integers(1, 100)
OPTIONS = st.builds(
    WindowOptions,
    stride=st.floats(0.05, 1),
    scales=st.lists(st.floats(1, 3), min_size=1, max_size=3).map(tuple),
    flip=st.booleans(),
)


def times_covered(view):
    """How often each pixel of a view lies in a window."""
    times = np.zeros((view.height, view.width), int)
    for top in view.tops:
        for left in view.lefts:
            assert top >= 0
            assert left >= 0
            assert top + view.side <= view.height
            assert left + view.side <= view.width
            times[top : top + view.side, left : left + view.side] += 1
    return times


@settings(deadline=None)
@given(LENGTHS, LENGTHS, st.integers(1, 40), OPTIONS)
def test_windows_cover_every_pixel_and_none_leaves_the_view(height, width, side, options):
    views = views_of(height, width, side, options)
    assert len(views) == len(options.scales) * (2 if options.flip else 1)
    for view in views:
        assert (times_covered(view) >= 1).all()
        assert (view.tops[0], view.lefts[0]) == (0, 0)
        assert (view.tops[-1], view.lefts[-1]) == (view.height - side, view.width - side)  # the last end at the border
        assert view.count == len(set(view.tops)) * len(set(view.lefts))  # none twice
        stride = max(1, round(side * options.stride))
        for starts in (view.tops, view.lefts):
            distances = np.diff(starts)
            assert (distances[:-1] == stride).all()
            assert (distances <= stride).all()


@settings(deadline=None)
@given(LENGTHS, LENGTHS, st.integers(1, 40), st.floats(1, 3))
def test_a_view_keeps_the_shape_of_the_image_and_its_shorter_side_is_that_of_a_window(height, width, side, scale):
    (view,) = views_of(height, width, side, WindowOptions(scales=(scale,)))
    assert min(view.height, view.width) == round(side * scale)
    assert (view.height <= view.width) == (height <= width) or view.height == view.width
    shorter, longer = sorted((height, width))
    assert max(view.height, view.width) == pytest.approx(round(side * scale) * longer / shorter, abs=0.5)


@pytest.mark.parametrize(
    ("size", "options", "tops", "lefts"),
    [
        ((12, 12), PLAIN, (0,), (0,)),
        ((12, 30), PLAIN, (0,), (0, 12, 18)),
        ((36, 12), PLAIN, (0, 12, 24), (0,)),
        ((12, 24), PLAIN, (0,), (0, 12)),
        ((12, 24), WindowOptions(stride=0.5), (0,), (0, 6, 12)),
        ((12, 26), WindowOptions(stride=0.75), (0,), (0, 9, 14)),
        ((120, 300), PLAIN, (0,), (0, 12, 18)),
        ((3, 3), WindowOptions(scales=(1.5,)), (0, 6), (0, 6)),
    ],
)
def test_places_of_windows_by_hand(size, options, tops, lefts):
    (view,) = views_of(*size, SIDE, options)
    assert (view.tops, view.lefts) == (tops, lefts)
    assert view.count == len(tops) * len(lefts)


@pytest.mark.parametrize("stride", [0.9, 0.5, 0.3])
def test_windows_overlap_with_a_stride_below_one(stride):
    (view,) = views_of(SIDE, 5 * SIDE, SIDE, WindowOptions(stride=stride))
    covered = times_covered(view)
    assert all((covered[:, left] > 1).all() for left in view.lefts[1:])
    assert covered.sum() == view.count * SIDE**2


def logits_of(view, classes=4, seed=0):
    return torch.randn(view.count, classes, GRID, GRID, generator=torch.Generator().manual_seed(seed))


def test_windows_are_cut_row_by_row():
    (view,) = views_of(20, 31, SIDE, WindowOptions(stride=0.6, scales=(1.4,)))
    image = torch.arange(2 * view.height * view.width).view(2, view.height, view.width)
    cut = view.cut(image)
    assert cut.shape == (view.count, 2, SIDE, SIDE)
    places = [(top, left) for top in view.tops for left in view.lefts]
    for window, (top, left) in zip(cut, places):
        assert torch.equal(window, image[:, top : top + SIDE, left : left + SIDE])


@pytest.mark.parametrize("size", [(12, 12), (12, 31), (40, 13)])
@pytest.mark.parametrize("flip", [False, True])
def test_constant_logits_stay_constant(size, flip):
    for view in views_of(*size, SIDE, WindowOptions(stride=0.7, flip=flip, scales=(1.0, 1.3))):
        constant = torch.tensor([1.5, -2.0, 0.25]).view(1, 3, 1, 1).expand(view.count, -1, GRID, GRID)
        merged = view.merge(constant)
        assert merged.shape == (3, view.height, view.width)
        assert torch.equal(merged, constant[0, :, :1, :1].expand_as(merged))


def merged_by_hand(view, upsampled):
    """Pixel by pixel, the mean of the windows that hold it."""
    merged = np.zeros((upsampled.shape[1], view.height, view.width))
    places = [(top, left) for top in view.tops for left in view.lefts]
    for y in range(view.height):
        for x in range(view.width):
            values = [
                upsampled[number, :, y - top, x - left]
                for number, (top, left) in enumerate(places)
                if 0 <= y - top < view.side and 0 <= x - left < view.side
            ]
            merged[:, y, x] = np.mean(values, axis=0)
    return merged


@pytest.mark.parametrize("options", [PLAIN, WindowOptions(stride=0.5), WindowOptions(stride=0.4, scales=(1.6,))])
@pytest.mark.parametrize("size", [(12, 29), (25, 12), (12, 12)])
def test_overlapping_windows_are_averaged(size, options):
    (view,) = views_of(*size, SIDE, options)
    logits = logits_of(view)
    upsampled = F.interpolate(logits, size=(SIDE, SIDE), mode="bilinear", align_corners=False).numpy()
    result = view.merge(logits)
    assert result.dtype == torch.float32
    assert np.allclose(result.numpy(), merged_by_hand(view, upsampled), atol=1e-6)


def test_pixels_that_are_cut_and_merged_come_back():
    """Windows whose logits are their pixels, of an image that bilinear resizing does not change."""
    for view in views_of(20, 47, SIDE, WindowOptions(stride=0.35, scales=(1.0, 1.5), flip=True)):
        image = torch.rand(3, view.height, view.width)
        assert torch.allclose(view.merge(view.cut(image)), image, atol=1e-6)


def test_half_precision_is_merged_in_float32():
    (view,) = views_of(12, 29, SIDE, PLAIN)
    logits = logits_of(view).bfloat16()
    assert torch.equal(view.merge(logits), view.merge(logits.float()))


def test_a_sliding_window_equals_the_whole_image_when_it_covers_it():
    (view,) = views_of(30, 30, SIDE, WindowOptions(stride=0.5))
    assert view == View(SIDE, SIDE, SIDE, (0,), (0,), False)
    image, logits = torch.rand(3, SIDE, SIDE), logits_of(view)
    assert torch.equal(view.cut(image), image[None])
    whole = F.interpolate(logits, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    assert torch.equal(view.merge(logits), whole[0])
    at_size = F.interpolate(whole, size=(30, 30), mode="bilinear", align_corners=False)
    assert torch.equal(label_map([logits], [view], (30, 30)), at_size[0].argmax(dim=0).byte())


def test_flipped_views_are_undone():
    """A model that sees single pixels says the same of an image and of its mirror image."""
    plain, flipped = views_of(12, 31, SIDE, WindowOptions(stride=0.5, flip=True))
    assert (plain.flipped, flipped.flipped) == (False, True)
    image = torch.rand(4, plain.height, plain.width)
    assert torch.equal(flipped.cut(image), plain.cut(image.flip(-1)))
    assert torch.equal(flipped.merge(flipped.cut(image)), plain.merge(plain.cut(image.flip(-1))).flip(-1))
    assert torch.allclose(flipped.merge(flipped.cut(image)), plain.merge(plain.cut(image)), atol=1e-6)


def test_the_probabilities_of_several_views_are_averaged():
    options = WindowOptions(stride=0.8, scales=(1.0, 1.75), flip=True)
    views, size = views_of(25, 44, SIDE, options), (25, 44)
    logits = [3 * logits_of(view, seed=number) for number, view in enumerate(views)]
    total = 0
    for view, own in zip(views, logits):
        at_first = F.interpolate(view.merge(own)[None], size=(views[0].height, views[0].width), mode="bilinear")
        total = total + at_first.softmax(dim=1)
    expected = F.interpolate(total, size=size, mode="bilinear")[0].argmax(dim=0)
    result = label_map(logits, views, size)
    assert (result.shape, result.dtype) == (size, torch.uint8)
    assert (result != expected).float().mean() < 0.002  # the last digit may decide between two classes
    alone = [label_map([own], [view], size) for view, own in zip(views, logits)]
    assert all((result != own).any() for own in alone)


def test_the_surer_view_decides():
    views = views_of(12, 12, SIDE, WindowOptions(flip=True))
    unsure, sure = torch.zeros(1, 2, GRID, GRID), torch.zeros(1, 2, GRID, GRID)
    unsure[:, 0], sure[:, 1] = 1.0, 5.0
    assert (label_map([unsure, sure], views, (12, 12)) == 1).all()
    assert (label_map([sure, unsure], views, (12, 12)) == 1).all()


@pytest.mark.parametrize("held", [1, 100, 2 * 20 * 30, 3 * 20 * 30 + 7])
def test_classes_in_groups_give_the_map_of_all_at_once(monkeypatch, held):
    scores, size = torch.randn(7, 5, 6), (20, 30)
    whole = upsampled_argmax(scores, size)
    expected = F.interpolate(scores[None], size=size, mode="bilinear", align_corners=False)[0].argmax(dim=0)
    assert whole.dtype == torch.uint8
    assert torch.equal(whole, expected.byte())
    monkeypatch.setattr(windows, "_UPSAMPLED", held)
    assert torch.equal(upsampled_argmax(scores, size), whole)


def test_the_first_of_equal_classes_is_taken_in_any_group(monkeypatch):
    scores = torch.zeros(5, 4, 4)
    scores[0] = -1
    for held in (10**9, 1, 32):
        monkeypatch.setattr(windows, "_UPSAMPLED", held)
        assert (upsampled_argmax(scores, (4, 4)) == 1).all()


def test_the_highest_class_index_fits():
    scores = torch.zeros(255, 2, 2)
    scores[254] = 1
    assert (upsampled_argmax(scores, (3, 3)) == 254).all()


@pytest.mark.parametrize("stride", [0.0, -0.5, 1.1, float("nan")])
def test_a_stride_that_leaves_gaps_or_never_ends_is_refused(stride):
    with pytest.raises(ValueError, match="stride must be above 0 and at most 1"):
        WindowOptions(stride=stride)


@pytest.mark.parametrize("scales", [(), (0.5,), (1.0, 0.99)])
def test_scales_at_which_an_image_fills_no_window_are_refused(scales):
    with pytest.raises(ValueError, match="scales must be at least 1, since an image must fill a window"):
        WindowOptions(scales=scales)


def test_the_hash_follows_what_the_windows_show():
    described = describe_windows(CONFIG, PLAIN)
    assert described["task"] == "segmentation"
    assert "crop" not in described
    assert windows_hash(CONFIG, PLAIN) == windows_hash(CONFIG.replace(crop=0.5), WindowOptions(stride=1, scales=(1,)))
    others = [
        windows_hash(CONFIG, WindowOptions(stride=0.5)),
        windows_hash(CONFIG, WindowOptions(scales=(1.0, 1.5))),
        windows_hash(CONFIG, WindowOptions(flip=True)),
        windows_hash(CONFIG.replace(rounds=make_rounds([32, 64], [1, 2])), PLAIN),
        windows_hash(CONFIG.replace(mean=(0.5, 0.5, 0.5)), PLAIN),
    ]
    assert len({windows_hash(CONFIG, PLAIN), *others}) == 6
