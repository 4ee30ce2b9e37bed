"""The engine for segmentation: it answers what evaluation does, image by image, in full batches and in order."""

import io
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import progresvit
from progresvit import compute
from progresvit.config import ModelConfig, make_rounds
from progresvit.data.segmentation.images import evaluation_image
from progresvit.data.segmentation.windows import WindowOptions, windows_hash
from progresvit.data.transforms import normalise
from progresvit.engine import Engine, MemoryWarning, SegmentationEngine, window_batcher
from progresvit.engine.window_batcher import WindowBatcher
from progresvit.model import ProgResViT
from progresvit.predict.segment import segment_rounds
from progresvit.routing import SettingWarning
from tests.factories import setting_of

SMALL = {"depth": 2, "patch_size": 16, "num_classes": 3, "task": "segmentation", "labels": ("sky", "road", "tree")}
CONFIGS = {
    "two rounds": ModelConfig(rounds=make_rounds([32, 48], [1, 2]), heads=2, **SMALL),
    "three rounds": ModelConfig(rounds=make_rounds([32, 32, 48], [1, 1, 2]), heads=2, **SMALL),
}
SIZES = [(48, 48), (90, 60), (33, 121), (16, 16), (48, 96), (200, 150), (17, 60), (61, 48), (48, 30), (100, 100)]
"""Widths and heights, 1 to 4 windows each."""


def made_model(config, randomize):
    torch.manual_seed(3)
    model = randomize(ProgResViT(config))
    with torch.no_grad():
        model.head.weight *= 12  # scores that differ from image to image
    return model


@pytest.fixture
def model(randomize):
    return made_model(CONFIGS["two rounds"], randomize)


def made_images(sizes=SIZES, seed=0):
    rng = np.random.default_rng(seed)
    small = (Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)) for _ in sizes)
    return [image.resize(size, Image.Resampling.BICUBIC) for image, size in zip(small, sizes)]


@pytest.fixture
def images():
    return made_images(SIZES * 3)


def evaluated(model, images, options=WindowOptions()):  # noqa: B008
    """The label map and score of every round, as evaluation gives them: by image, then by round."""
    cut = [evaluation_image(image, None, model.config, options, "it").cut(model.config, torch.device("cpu"))
           for image in images]  # fmt: skip
    with torch.inference_mode():
        return segment_rounds(model, cut, batch=7), [len(one.windows) for one in cut]


def assert_agrees(found, expected, tolerance=1e-4, pixels=2e-3):
    """The same map but for pixels on the border of two classes, since folding changes the last digits."""
    assert found.score == pytest.approx(expected.score.item(), abs=tolerance)
    assert found.labels.shape == expected.labels.shape
    assert found.labels.dtype == np.uint8
    assert (found.labels != expected.labels.cpu().numpy()).mean() <= pixels


def middling(rounds, s, share=0.5):
    """A threshold between two scores of a round, so that rounding decides nothing."""
    scores = sorted(image[s].score.double().item() for image in rounds)
    place = round(share * len(scores))
    while scores[place] - scores[place - 1] < 1e-4:
        place += 1
    return (scores[place - 1] + scores[place]) / 2


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("batch", [1, 5, 64])
def test_an_engine_that_runs_every_round_or_only_the_first_equals_evaluation(name, batch, images, randomize):
    model = made_model(CONFIGS[name], randomize)
    rounds, counts = evaluated(model, images)
    gmacs = compute.cumulative_gmacs(model.config)
    for threshold, s in ((0.0, len(gmacs) - 1), (float("inf"), 0)):
        found = SegmentationEngine(model, threshold, batch=batch).segment(images)
        assert [one.exit_round for one in found] == [s + 1] * len(images)
        assert [one.windows for one in found] == counts
        for one, expected, image in zip(found, rounds, images):
            assert_agrees(one, expected[s])
            assert one.labels.shape == (image.height, image.width)
            assert one.gmacs == pytest.approx(gmacs[s] * one.windows)
            assert one.error is None


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_every_image_has_the_answer_of_the_round_after_which_it_exits(model, images, batch):
    rounds, _ = evaluated(model, images)
    threshold = middling(rounds, 0)
    found = SegmentationEngine(model, threshold, batch=batch).segment(images)
    assert [one.exit_round == 1 for one in found] == [image[0].score.double().item() < threshold for image in rounds]
    assert {one.exit_round for one in found} == {1, 2}
    for one, expected in zip(found, rounds):
        assert_agrees(one, expected[one.exit_round - 1])


def test_three_rounds_have_two_thresholds(images, randomize):
    model = made_model(CONFIGS["three rounds"], randomize)
    rounds, _ = evaluated(model, images)
    thresholds = (middling(rounds, 0, 0.3), middling(rounds, 1, 0.6))
    found = SegmentationEngine(model, thresholds, batch=6).segment(images)
    for one, expected in zip(found, rounds):
        below = [expected[s].score.double().item() < thresholds[s] for s in range(2)]
        assert one.exit_round == (1 if below[0] else 2 if below[1] else 3)
        assert_agrees(one, expected[one.exit_round - 1])
    assert {one.exit_round for one in found} == {1, 2, 3}


@pytest.mark.parametrize(
    "options",
    [
        WindowOptions(stride=0.5),
        WindowOptions(scales=(1.0, 1.5)),
        WindowOptions(stride=0.7, scales=(1.0, 1.3), flip=True),
    ],
    ids=["overlapping", "scales", "all"],
)
def test_overlapping_windows_scales_and_flips_equal_evaluation(model, images, options):
    rounds, counts = evaluated(model, images[:10], options)
    found = SegmentationEngine(model, 0.0, batch=8, windows=options).segment(images[:10])
    assert [one.windows for one in found] == counts
    for one, expected in zip(found, rounds):
        assert_agrees(one, expected[1])


def logits_of(model, pixels):
    """Of the last round, upsampled to the window: (r, r, C) bytes -> (K, r, r)."""
    with torch.no_grad():
        output = model(normalise(torch.from_numpy(pixels).permute(2, 0, 1)[None], model.config))[-1]
        return F.interpolate(output.logits, size=pixels.shape[:2], mode="bilinear", align_corners=False)[0]


def test_an_image_of_the_models_input_side_is_one_window(model):
    (image,) = made_images([(48, 48)])
    (found,) = SegmentationEngine(model, 0.0).segment([image])
    assert found.windows == 1
    assert np.array_equal(SegmentationEngine(model, 0.0).segment(image).labels, found.labels)
    assert (found.labels == logits_of(model, np.array(image)).argmax(dim=0).numpy()).mean() > 0.998


def test_overlapping_windows_are_averaged(model):
    (image,) = made_images([(72, 48)])
    pixels = np.array(image)
    total, times = torch.zeros(3, 48, 72), torch.zeros(72)
    for left in (0, 24):
        total[:, :, left : left + 48] += logits_of(model, np.ascontiguousarray(pixels[:, left : left + 48]))
        times[left : left + 48] += 1
    (found,) = SegmentationEngine(model, 0.0, windows=WindowOptions(stride=0.5)).segment([image])
    assert found.windows == 2
    assert (found.labels == (total / times).argmax(dim=0).numpy()).mean() > 0.998


@pytest.fixture
def batches(monkeypatch):
    """The round and number of windows of every batch that runs."""
    ran = []
    run = SegmentationEngine._run

    def counted(self, s, windows, tokens):
        ran.append((s, len(windows)))
        return run(self, s, windows, tokens)

    monkeypatch.setattr(SegmentationEngine, "_run", counted)
    return ran


def test_every_round_runs_full_batches_until_the_input_ends(images, batches, randomize):
    model = made_model(CONFIGS["three rounds"], randomize)
    rounds, _ = evaluated(model, images)
    found = SegmentationEngine(model, (middling(rounds, 0, 0.3), middling(rounds, 1, 0.5)), batch=8).segment(images)
    for s in range(3):
        sizes = [count for number, count in batches if number == s]
        assert sum(sizes) == sum(one.windows for one in found if one.exit_round > s)
        assert len(sizes) > 1
        assert sizes[:-1] == [8] * (len(sizes) - 1)


def test_a_large_image_is_divided_among_batches(model, batches):
    images = made_images([(480, 48), (48, 48)])
    rounds, counts = evaluated(model, images)
    assert counts == [10, 1]
    found = SegmentationEngine(model, 0.0, batch=4).segment(images)
    assert batches == [(0, 4), (0, 4), (0, 3), (1, 4), (1, 4), (1, 3)]
    for one, expected in zip(found, rounds):
        assert_agrees(one, expected[1])


def test_the_stream_is_lazy_in_order_and_the_same_as_a_list(model, images):
    engine = SegmentationEngine(model, 0.0, batch=4)
    coming = iter(images)
    stream = engine.stream(coming)
    first = next(stream)
    left = list(coming)
    assert len(left) >= len(images) - 12  # it takes a few ahead, and those that fill two batches
    assert np.array_equal(first.labels, engine.segment(images[:1])[0].labels)
    stream = engine.stream(iter(images))
    first = next(stream)
    rest = list(stream)
    whole = engine.segment(images)
    assert len(whole) == len(images)
    for one, other, image in zip([first, *rest], whole, images):
        assert np.array_equal(one.labels, other.labels)
        assert one.labels.shape == (image.height, image.width)


def test_images_in_flight_are_bounded_in_pixels_and_windows(model, monkeypatch):
    images = made_images([(48, 48)] * 40)
    rounds, _ = evaluated(model, images)
    hard = max(range(40), key=lambda number: rounds[number][0].score)
    images = [images[hard], *(image for number, image in enumerate(images) if number != hard)]
    score = rounds[hard][0].score.double().item()
    engine = SegmentationEngine(model, score * (1 - 1e-6), batch=4)  # only the first image continues

    def taken_for_first():
        coming = iter(images)
        next(engine.stream(coming))
        return 40 - len(list(coming))

    assert taken_for_first() == 40
    monkeypatch.setattr(window_batcher, "HELD_PIXELS", 10 * 48 * 48)
    assert taken_for_first() == 11 + 4
    monkeypatch.setattr(window_batcher, "HELD_PIXELS", 2**28)
    monkeypatch.setattr(window_batcher, "HELD_BATCHES", 3)
    assert taken_for_first() == 13 + 4


def test_no_more_windows_wait_for_a_round_than_a_batch_and_an_image(model, images, monkeypatch):
    most = 0
    feed = WindowBatcher.feed

    def checked(self, image):
        nonlocal most
        feed(self, image)
        most = max(most, *(sum(one.count for one in queue) for queue in self._queues))
        for queue in self._queues:
            for one in queue:
                assert one.tokens is None or one.tokens._base is None  # no view that keeps a whole batch alive
                assert all(pixels.dtype == torch.uint8 for pixels in one.image.pixels)

    monkeypatch.setattr(WindowBatcher, "feed", checked)
    SegmentationEngine(model, 0.0, batch=5).segment(images)
    assert 0 < most < 5 + 4


def test_bad_images_have_their_reason_and_harm_no_other(model, tmp_path, monkeypatch):
    good = made_images()[:3]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 48 * 48 * 20)
    (tmp_path / "note.txt").write_text("hello")
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 90).save(buffer, "JPEG")
    bad = {
        tmp_path / "none.png": "no such file",
        tmp_path / "note.txt": "not an image",
        buffer.getvalue()[:-900]: "truncated",
        b"": "not an image",
        "https://a.org/b.jpg": "download it",
        tmp_path: "a folder",
    }
    given = [
        good[0],
        *bad,
        Image.new("RGB", (15, 40)),
        Image.new("RGB", (16, 800)),
        Image.new("F", (40, 40)),
        *good[1:],
    ]
    reasons = [*bad.values(), "smaller than a patch of 16 pixels (15 x 40)", "too long and thin", "floating-point"]
    found = SegmentationEngine(model, 0.0, batch=2).segment(given)
    for one, reason in zip(found[1:-2], reasons, strict=True):
        assert reason in one.error
        assert (one.labels, one.exit_round, one.gmacs, one.windows) == (None, 0, 0.0, 0)
        assert np.isnan(one.score)
    for one, expected in zip([found[0], *found[-2:]], evaluated(model, good)[0]):
        assert one.error is None
        assert_agrees(one, expected[1])
    assert [one.error is None for one in SegmentationEngine(model, 0.0).segment([b"", b""])] == [False, False]


def test_paths_bytes_and_pil_images_give_the_same(model, tmp_path):
    images = made_images()[:3]
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
    engine = SegmentationEngine(model, 0.0)
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    whole = engine.segment(images)
    for given in (paths, [str(path) for path in paths], [path.read_bytes() for path in paths], map(Image.open, paths)):
        for one, other in zip(engine.segment(given), whole, strict=True):
            assert np.array_equal(one.labels, other.labels)
    assert engine.segment([]) == []
    assert len(engine.segment([images[0]] * 3)) == 3


def test_images_are_upright_and_rgb(model):
    (image,) = made_images([(90, 60)])
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    turned, grey = SegmentationEngine(model, 0.0).segment([buffer.getvalue(), image.convert("L")])
    assert (turned.labels.shape, grey.labels.shape) == ((90, 60), (60, 90))


def a_setting(model, windows=WindowOptions(), **changes):  # noqa: B008
    fields = {"threshold": 0.5, "preprocessing_sha256": windows_hash(model.config, windows), "n": 100}
    return setting_of(model, **{"rule": "near-lossless", **fields, **changes})


def test_a_setting_holds_for_its_own_weights_windows_and_precision(model, tmp_path):
    folder = progresvit.save(model, tmp_path / "model")
    with pytest.warns(SettingWarning, match="every round runs, because"):
        assert SegmentationEngine(folder).thresholds == (0.0,)
    (folder / "settings").mkdir()
    a_setting(model).save(folder / "settings" / "near-lossless.json")
    a_setting(model, WindowOptions(stride=0.5), threshold=0.7).save(folder / "settings" / "careful.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SegmentationEngine(folder).thresholds == (0.5,)
        assert SegmentationEngine(folder).setting.rule == "near-lossless"
        assert SegmentationEngine(folder, "careful", windows=WindowOptions(stride=0.5)).thresholds == (0.7,)
        assert SegmentationEngine(str(folder), folder / "settings" / "near-lossless.json").thresholds == (0.5,)
        assert SegmentationEngine(folder, 0.3).setting is None
    with pytest.warns(SettingWarning, match="other preprocessing: expect other results"):
        SegmentationEngine(folder, windows=WindowOptions(stride=0.5))
    with pytest.warns(SettingWarning, match="other precision"):
        SegmentationEngine(folder, precision="bf16")
    with pytest.raises(ValueError, match="has no setting 'low'"):
        SegmentationEngine(folder, "low")
    setting = a_setting(model)
    with torch.no_grad():
        model.head.bias += 1e-3
    with pytest.raises(ValueError, match="other weights"):
        SegmentationEngine(model, setting)


def test_models_of_the_other_task_are_refused_with_a_remedy(model, small_model, tmp_path):
    with pytest.raises(
        ValueError, match=r"this one segments; use progresvit.SegmentationEngine, or progresvit segment"
    ):
        Engine(model, 0.5)
    folder = progresvit.save(model, tmp_path / "model")
    with pytest.raises(ValueError, match=r"use progresvit\.SegmentationEngine"):
        Engine(folder, 0.5, backend="onnxruntime")
    with pytest.raises(ValueError, match=r"this one classifies; use progresvit.Engine, or progresvit classify"):
        SegmentationEngine(small_model, 0.5)
    with pytest.raises(ValueError, match="this one classifies"):
        SegmentationEngine("imagenet-tiny")
    from progresvit.engine.export.export import export

    with pytest.raises(ValueError, match=r"no export for segmentation; run .* progresvit\.SegmentationEngine"):
        export(model, tmp_path / "export")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda model: SegmentationEngine(model, -0.5), "0 .* or more, not -0.5"),
        (lambda model: SegmentationEngine(model, (0.1, 0.2)), "so 1 for 2 rounds, not 2"),
        (lambda model: SegmentationEngine(model, 0.5, precision="fp16"), "fp16 needs a CUDA device"),
        (lambda model: SegmentationEngine(model, 0.5, precision="fp8"), "unknown precision 'fp8'"),
        (lambda model: SegmentationEngine(grey(model), 0.5), "3 channels and this model takes 1"),
        (lambda model: SegmentationEngine(model, 0.5).segment([3]), "or a PIL image, not int"),
        (lambda model: SegmentationEngine(model, 0.5).segment(b"content"), r"segment\(\[image\]\)"),
        (lambda model: list(SegmentationEngine(model, 0.5).stream("cat.jpg")), r"segment\(\[image\]\)"),
        (lambda model: SegmentationEngine(model, a_setting(model, rounds=3)), "for a model of 3 rounds"),
        (lambda model: SegmentationEngine(model, a_setting(model, router="abc")), "learned router"),
    ],
)
def test_bad_input_is_refused(model, make, match):
    with pytest.raises(ValueError, match=match):
        make(model)


def grey(model):
    return ProgResViT(model.config.replace(in_channels=1, mean=(0.5,), std=(0.5,)))


def test_images_with_broken_logits_run_every_round(model, images):
    with torch.no_grad():
        model.head.bias[1] = torch.nan
    found = SegmentationEngine(model, float("inf")).segment(images[:3])
    assert [(one.exit_round, one.score) for one in found] == [(2, float("inf"))] * 3


def test_what_the_stream_raises_comes_out_and_the_engine_can_be_used_again(model, images):
    engine = SegmentationEngine(model, 0.0)

    def broken():
        yield images[0]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(engine.stream(broken()))
    stream = engine.stream(images)
    next(stream)
    assert len(engine.segment(images[:2])) == 2  # streams share nothing
    stream.close()


def test_out_of_memory_halves_the_batch_remembers_it_and_says_so_once(model, images, monkeypatch):
    whole = SegmentationEngine(model, 0.0).segment(images)
    engine = SegmentationEngine(model, 0.0, batch=16)
    forward = type(engine._rounds[0]).forward

    def narrow(self, windows, previous=None):
        if len(windows) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, windows, previous)

    monkeypatch.setattr(type(engine._rounds[0]), "forward", narrow)
    with pytest.warns(MemoryWarning, match="continues with smaller batches") as caught:
        found = engine.segment(images)
    assert len(caught) == 1
    assert engine.batch == 4
    for one, other in zip(found, whole, strict=True):
        assert (one.labels != other.labels).mean() <= 2e-3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(engine.segment(images)) == len(images)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance", "pixels"), [("fp32", 5e-3, 0.01), ("bf16", 0.15, 0.12)])
def test_a_gpu_gives_the_answers_of_the_cpu(model, images, precision, tolerance, pixels):
    rounds, counts = evaluated(model, images)
    for threshold, s in ((0.0, 1), (float("inf"), 0)):
        engine = SegmentationEngine(model, threshold, device="cuda", precision=precision, batch=8)
        found = engine.segment(images)
        assert [one.windows for one in found] == counts
        assert {one.exit_round for one in found} == {s + 1}
        assert np.mean([(one.labels != each[s].labels.numpy()).mean() for one, each in zip(found, rounds)]) < pixels
        for one, expected in zip(found, rounds):
            assert_agrees(one, expected[s], tolerance, pixels=0.5)
    threshold = middling(rounds, 0)
    found = SegmentationEngine(model, threshold, device="cuda", precision=precision, batch=8).segment(images)
    for one, expected in zip(found, rounds):
        score = expected[0].score.item()
        if abs(score - threshold) > tolerance:
            assert one.exit_round == (1 if score < threshold else 2)
    assert next(model.parameters()).device.type == "cpu"


def test_a_model_of_one_round_needs_no_threshold(images, randomize):
    config = ModelConfig(rounds=make_rounds([48], [2]), heads=2, psg=False, **SMALL)
    results = SegmentationEngine(made_model(config, randomize)).segment(images)
    assert {result.exit_round for result in results} == {1}
