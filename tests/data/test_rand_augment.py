"""RandAugment of batches against timm's for single images: the same bytes, the same distribution of draws."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from scipy.stats import chi2_contingency, ks_2samp
from timm.data import auto_augment

import progresvit
from progresvit.data.augment.classification import Augmentation, training_transform
from progresvit.data.augment.rand_augment import OPERATIONS, Draws, RandAugment
from tests.factories import tiny_config

FILL = (124, 116, 104)
NOTATIONS = (
    "rand-m9-mstd0.5-inc1",
    "rand-m7-n3-p0.8",
    "rand-mstd101-inc0",
    "rand-m15-mmax20-mstd3.-inc1",
    "rand-tweights",
)
FILES = [
    *sorted((Path(__file__).parents[1] / "images").glob("*.jpg")),
    *sorted((Path(progresvit.__file__).parent / "samples").glob("*.jpg")),
]


def batch_of(images):
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]).contiguous()


@pytest.fixture(scope="module")
def images():
    """Photos, one colour, two colours, and noise."""
    photos = [Image.open(file).convert("RGB").resize((64, 64)) for file in FILES]
    halves = Image.new("RGB", (64, 64), (0, 255, 90))
    halves.paste((3, 254, 91), (0, 0, 64, 32))
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    return [*photos, Image.new("RGB", (64, 64), (7, 100, 255)), halves, noise]


def theirs(name, image, argument):
    """timm's operation on a single image."""
    if name.startswith("Posterize") and argument < 1:  # Pillow gave black before it refused to keep 0 bits
        return Image.new("RGB", image.size)
    whole = name.startswith(("Posterize", "Solarize"))
    arguments = () if name in ("AutoContrast", "Equalize", "Invert") else (int(argument) if whole else argument,)
    options = {"fillcolor": FILL, "resample": Image.Resampling.BICUBIC}
    return auto_augment.NAME_TO_OP[name](image, *arguments, **options)


def ours(name, batch, argument):
    own = RandAugment(
        operations=(name,), weights=None, magnitude=0, deviation=0, limit=0, layers=1, probability=1, fill=FILL
    )
    shape = (len(batch), 1)
    return own.augment(batch, Draws(np.zeros(shape, np.int64), argument.reshape(shape), np.ones(shape, bool)))


def check(name, batch, expected):
    difference = (batch.int() - batch_of(expected).int()).abs()
    if name == "Rotate":  # sine and cosine may differ in the last digit, and Pillow cuts to bytes
        assert difference.max() <= 1
        assert (difference > 0).float().mean() < 1e-5
    else:
        assert difference.max() == 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_gives_the_bytes_of_pillow(name, images):
    rng = np.random.default_rng(1)
    levels = [np.zeros(len(images)), np.ones(len(images)), *rng.random((3, len(images)))]
    for level in levels:
        argument = OPERATIONS[name].argument(level, rng.choice([-1.0, 1.0], len(images)))
        expected = [theirs(name, image, value) for image, value in zip(images, argument)]
        check(name, ours(name, batch_of(images), argument), expected)


@pytest.mark.parametrize("side", [3, 16, 31])
@pytest.mark.parametrize("name", ["Equalize", "Rotate", "Sharpness", "ShearX", "TranslateYRel"])
def test_small_and_odd_images_equal_pillows_too(name, side, images):
    small = [image.resize((side, side)) for image in images]
    argument = np.linspace(0.1, 0.4, len(small)) * (60 if name == "Rotate" else 1)
    expected = [theirs(name, image, value) for image, value in zip(small, argument)]
    check(name, ours(name, batch_of(small), argument), expected)


@pytest.mark.parametrize("degrees", [0.0, 90.0, -180.0, 270.0, 360.0])
def test_whole_turns_move_pixels_without_a_change(degrees, images):
    argument = np.full(len(images), degrees)
    expected = [image.rotate(degrees) for image in images]
    assert torch.equal(ours("Rotate", batch_of(images), argument), batch_of(expected))


def test_posterizing_keeps_the_highest_bits_and_none_gives_black(images):
    batch = batch_of(images)
    for bits in (-1, 0, 1, 4, 8, 12):
        changed = ours("Posterize", batch, np.full(len(images), float(bits)))
        if bits < 1:
            assert not changed.any()
        else:
            expected = [ImageOps.posterize(image, min(bits, 8)) for image in images]
            assert torch.equal(changed, batch_of(expected))


@pytest.mark.parametrize("negated", [False, True])
def test_a_magnitude_means_the_same_argument_as_in_timm(negated, monkeypatch):
    monkeypatch.setattr(auto_augment, "_randomly_negate", lambda value: -value if negated else value)
    magnitudes = np.concatenate([np.linspace(0, 10, 401), np.linspace(10, 30, 101)])
    sign = np.full(len(magnitudes), -1.0 if negated else 1.0)
    for name, operation in OPERATIONS.items():
        level = auto_augment.LEVEL_TO_ARG[name]
        expected = [0.0 if level is None else level(magnitude, {})[0] for magnitude in magnitudes]
        assert operation.argument(magnitudes / 10, sign).tolist() == pytest.approx(expected, abs=1e-12), name


def timm_transform(notation):
    """The RandAugment of the loader."""
    config = tiny_config(num_classes=4)
    steps = training_transform(config, Augmentation(rand_augment=notation)).transforms
    (rand_augment,) = [step for step in steps if isinstance(step, auto_augment.RandAugment)]
    return rand_augment, RandAugment.parse(notation, config.mean)


@pytest.mark.parametrize("notation", NOTATIONS)
def test_a_notation_means_the_same_as_in_timm(notation):
    their, our = timm_transform(notation)
    assert our.operations == tuple(op.name for op in their.ops)
    assert our.layers == their.num_layers
    if their.choice_weights is None:
        assert our.weights is None
    else:
        assert np.allclose(np.array(our.weights) / sum(our.weights), their.choice_weights)
    for op in their.ops:
        assert (our.magnitude, our.probability, our.deviation) == (op.magnitude, op.prob, op.magnitude_std)
        assert our.limit == (op.magnitude_max or 10)
        assert our.fill == op.kwargs["fillcolor"]
        assert op.kwargs["resample"] == Image.Resampling.BICUBIC


@pytest.mark.parametrize(
    "notation", ["rand-m9-t3a", "rand-m9-w0", "rand-mstdinf", "rand-m9.5", "rand-", "augmix-m5-w4", "rand-n16-tweights"]
)
def test_a_notation_that_batches_cannot_have_is_refused_with_the_remedy(notation):
    with pytest.raises(ValueError, match=r"cannot run on batches: .*data\.mode=loader with data\.decode=cpu"):
        RandAugment.parse(notation)


def drawn_by_timm(notation, count):
    """(image, name of the operation, argument) for each operation that timm applies."""
    their, _ = timm_transform(notation)
    applied = []
    for op in their.ops:
        op.aug_fn = lambda image, *arguments, name=op.name, **_: applied.append((image, name, *(arguments or (0.0,))))
    random.seed(0)
    np.random.seed(0)
    for number in range(count):
        for op in np.random.choice(their.ops, their.num_layers, their.choice_weights is None, their.choice_weights):
            op(number)
    return applied


def drawn_by_us(notation, count):
    our = RandAugment.parse(notation)
    draws = our.sample(count, np.random.default_rng(0))
    return [
        (number, our.operations[draws.operation[number, layer]], draws.argument[number, layer])
        for number, layer in np.argwhere(draws.applied)
    ]


def same_counts(own, timms):
    """A chi-squared test at one in ten thousand, of how often each value occurs."""
    values = sorted({*own, *timms})
    table = np.array([[list(side).count(value) for value in values] for side in (own, timms)])
    return chi2_contingency(table[:, table.sum(axis=0) >= 20]).pvalue > 1e-4


def pairs(applied, count):
    """The first two operations of each image."""
    names = [[] for _ in range(count)]
    for number, name, _ in applied:
        names[number].append(name)
    return [" ".join(name[:2]) for name in names]


@pytest.mark.parametrize("notation", NOTATIONS)
def test_operations_and_arguments_are_drawn_as_timm_draws_them(notation):
    count = 12000
    own, timms = drawn_by_us(notation, count), drawn_by_timm(notation, count)
    assert same_counts([name for _, name, _ in own], [name for _, name, _ in timms])
    assert same_counts(pairs(own, count), pairs(timms, count))
    for operation in RandAugment.parse(notation).operations:
        left, right = ([float(value) for _, name, value in side if name == operation] for side in (own, timms))
        if min(len(left), len(right)) >= 20:
            assert ks_2samp(left, right).pvalue > 1e-4, operation


def test_the_tests_of_draws_can_tell_one_distribution_from_another():
    count = 12000
    own, timms = drawn_by_us("rand-m8-mstd0.5-inc1", count), drawn_by_timm("rand-m9-mstd0.5-inc1", count)
    for operation in ("Rotate", "BrightnessIncreasing", "SolarizeAdd"):
        left, right = ([float(value) for _, name, value in side if name == operation] for side in (own, timms))
        assert ks_2samp(left, right).pvalue < 1e-4
    assert not same_counts(pairs(drawn_by_us("rand-m9-p0.6-inc1", count), count), pairs(timms, count))
    with_repetition = [(number, name, 0) for number, name, _ in drawn_by_us("rand-p1.0-inc1", count)]
    without = drawn_by_us("rand-p1.0-tweights", count)
    assert any(len({*pair.split()}) == 1 for pair in pairs(with_repetition, count))
    assert not any(len({*pair.split()}) == 1 for pair in pairs(without, count))


@pytest.mark.parametrize("notation", ["rand-m9-n3-p0.9-mstd0.5-inc1", "rand-m9-n2-p1.0-mstd101", "rand-p1.0-tweights"])
def test_a_batch_is_augmented_as_its_images_one_by_one(notation, images):
    our = RandAugment.parse(notation, [value / 255 for value in FILL])
    many = images * 4
    draws = our.sample(len(many), np.random.default_rng(3))
    batch = batch_of(many)
    augmented = our.augment(batch, draws)
    expected = []
    for number, image in enumerate(many):
        for layer in np.flatnonzero(draws.applied[number]):
            name = our.operations[draws.operation[number, layer]]
            image = theirs(name, image, draws.argument[number, layer])
        expected.append(image)
    assert torch.equal(batch, batch_of(many))  # the input stays
    assert not torch.equal(augmented, batch)
    assert (augmented != batch_of(expected)).float().mean() < 1e-4  # the last digit of a rotation


def test_a_seed_gives_the_same_images_and_another_seed_others(images):
    our, batch = RandAugment.parse("rand-m9-mstd0.5-inc1"), batch_of(images)
    assert torch.equal(our(batch, 5), our(batch, 5))
    assert not torch.equal(our(batch, 5), our(batch, 6))


def test_floats_are_rounded_to_bytes_and_stay_floats(images):
    our, batch = RandAugment.parse("rand-m9-p1.0-mstd0.5-inc1"), batch_of(images)
    augmented = our(batch.float() + 0.3, seed=5)
    assert augmented.dtype == torch.float32
    assert torch.equal(augmented.to(torch.uint8), our(batch, seed=5))


def test_nothing_is_changed_where_nothing_is_applied(images):
    batch = batch_of(images)
    assert torch.equal(RandAugment.parse("rand-m9-p0.0")(batch, seed=0), batch)
    assert torch.equal(RandAugment.parse("rand-m9-n0")(batch, seed=0), batch)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("notation", NOTATIONS)
def test_a_gpu_gives_the_same_images_without_waiting_for_it(notation, images):
    our, batch = RandAugment.parse(notation), batch_of(images * 8)
    there = batch.cuda()
    our(there, seed=2)  # allocates
    torch.cuda.set_sync_debug_mode("error")
    try:
        augmented = our(there, seed=2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (augmented.cpu() != our(batch, seed=2)).float().mean() < 1e-4
