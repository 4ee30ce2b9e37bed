"""The engine for features: what ``model.features`` gives, for any images and batches, in order."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

import progresvit
from progresvit.baselines.early_exit import EarlyExit, EarlyExitConfig
from progresvit.config import ModelConfig, make_rounds, plain_vit
from progresvit.data.crop import crop
from progresvit.data.transforms import normalise
from progresvit.engine import Embedding, EmbeddingEngine, Engine, MemoryWarning
from progresvit.engine.embedding import EmbeddingEngine as Home
from progresvit.model import ProgResViT
from tests.engine.conftest import SMALL, random_pixels

CONFIGS = {
    "two rounds": ModelConfig(rounds=make_rounds([16, 32], [1, 3]), **SMALL),
    "without a head": ModelConfig(rounds=make_rounds([16, 24, 32], [1, 2, 3]), **{**SMALL, "num_classes": 0}),
    "larger input": ModelConfig(rounds=make_rounds([24, 24], [1, 2]), input_resolution=36, layer_scale=0.1, **SMALL),
    "merged tokens": ModelConfig(rounds=make_rounds([24, 32], [1, 3]), **SMALL).with_merge([3, 5]),
    "segmentation": ModelConfig(rounds=make_rounds([16, 32], [1, 3]), task="segmentation", **SMALL),
    "grey": ModelConfig(rounds=make_rounds([16, 32], [1, 2]), in_channels=1, mean=(0.4,), std=(0.2,), **SMALL),
    "a plain ViT": plain_vit(resolution=32, heads=3, depth=2, patch_size=8, num_classes=0),
}


@pytest.fixture
def model(randomize):
    return randomize(ProgResViT(CONFIGS["without a head"]))


def expected_features(model, pixels, pool="class"):
    """Of every round, by the model itself: (B, d) each."""
    with torch.no_grad():
        rounds = model.features(normalise(torch.from_numpy(pixels), model.config))
    return [(one.class_token if pool == "class" else one.patch_tokens.mean(dim=1)).numpy() for one in rounds]


def stacked(embeddings):
    return np.stack([one.features for one in embeddings])


@pytest.mark.parametrize("pool", ["class", "mean"])
@pytest.mark.parametrize("name", CONFIGS)
def test_features_equal_those_of_the_model_in_every_round(name, pool, randomize):
    model = randomize(ProgResViT(CONFIGS[name]))
    pixels = random_pixels(model.config, 11)
    for s, expected in enumerate(expected_features(model, pixels, pool)):
        engine = EmbeddingEngine(model, round=s + 1, pool=pool, batch=4)
        found = engine.embed(pixels)
        assert all(isinstance(one, Embedding) and one.error is None for one in found)
        assert all(one.features.dtype == np.float32 for one in found)
        assert stacked(found).shape == (11, engine.width) == expected.shape
        np.testing.assert_allclose(stacked(found), expected, atol=1e-4)
        assert expected.std(axis=0).max() > 0.01  # there is something to compare


def test_the_last_round_and_the_class_token_are_the_default(model):
    pixels = random_pixels(model.config, 3)
    engine = EmbeddingEngine(model)
    assert (engine.round, engine.pool, engine.batch) == (3, "class", 64)
    np.testing.assert_allclose(stacked(engine.embed(pixels)), expected_features(model, pixels)[-1], atol=1e-4)


def test_tensors_arrays_files_bytes_and_pil_images_give_the_same(model, tmp_path):
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (50, 40 + 7 * n, 3), dtype=np.uint8)) for n in range(3)]
    contents = []
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
        contents.append((tmp_path / f"{number}.png").read_bytes())
    pixels = np.stack([crop(image, model.config) for image in images])
    engine = EmbeddingEngine(model)
    expected = stacked(engine.embed(pixels))
    for given in (torch.from_numpy(pixels), images, contents, sorted(tmp_path.iterdir()), iter(images)):
        assert np.array_equal(stacked(engine.embed(given)), expected)


def test_one_path_or_pil_image_gives_one_embedding(model, tmp_path):
    image = Image.effect_noise((40, 40), 60).convert("RGB")
    image.save(tmp_path / "a.png")
    (expected,) = EmbeddingEngine(model).embed([image])
    for given in (image, tmp_path / "a.png"):
        np.testing.assert_array_equal(EmbeddingEngine(model).embed(given).features, expected.features)


def test_images_that_cannot_be_opened_have_their_reason_and_the_others_their_place(model, tmp_path):
    good = Image.new("RGB", (40, 40), "red")
    good.save(tmp_path / "good.png")
    (tmp_path / "torn.jpg").write_bytes(b"torn")
    given = [tmp_path / "none.png", tmp_path / "good.png", tmp_path / "torn.jpg", good, b""]
    for batch in (1, 2, 64):
        found = EmbeddingEngine(model, batch=batch).embed(given)
        assert [one.error is None for one in found] == [False, True, False, True, False]
        assert [one.features is None for one in found] == [True, False, True, False, True]
        assert "no such file" in found[0].error
        np.testing.assert_allclose(found[1].features, found[3].features, atol=1e-5)
    assert [one.error for one in EmbeddingEngine(model).embed([b"torn"])] == [found[2].error]


def test_no_images_give_no_features(model):
    engine = EmbeddingEngine(model)
    assert engine.embed([]) == list(engine.stream([])) == list(engine.stream([[], []])) == []


def test_a_stream_of_batches_gives_the_same_in_order_and_reads_a_few_ahead(model):
    pixels = random_pixels(model.config, 20)
    engine = EmbeddingEngine(model, batch=4)
    expected = stacked(engine.embed(pixels))
    taken = []

    def batches():
        for first, last in ((0, 1), (1, 1), (1, 11), (11, 14), (14, 18), (18, 20)):
            taken.append(first)
            yield pixels[first:last]

    stream = engine.stream(batches(), ahead=1)
    next(stream)
    assert len(taken) < 6
    stream.close()
    np.testing.assert_allclose(stacked(engine.stream(batches())), expected, atol=1e-5)


def test_what_the_stream_raises_comes_out_and_the_engine_can_be_used_again(model):
    pixels = random_pixels(model.config, 3)

    def broken():
        yield pixels
        raise KeyError("broken")

    engine = EmbeddingEngine(model)
    with pytest.raises(KeyError, match="broken"):
        list(engine.stream(broken()))
    assert len(engine.embed(pixels)) == 3


def test_a_folder_and_a_bundled_name_are_opened(model, tmp_path):
    pixels = random_pixels(model.config, 3)
    expected = EmbeddingEngine(model)
    engine = EmbeddingEngine(progresvit.save(model, tmp_path / "model"))
    assert np.array_equal(stacked(engine.embed(pixels)), stacked(expected.embed(pixels)))
    assert engine.identity() == expected.identity()
    assert EmbeddingEngine("imagenet-tiny", round=1).width == EmbeddingEngine(round=1).width == 192


def test_the_identity_is_that_of_the_weights_the_round_and_the_pooling(model, randomize):
    known = EmbeddingEngine(model).identity()
    assert known == EmbeddingEngine(model, batch=3, workers=1).identity()
    others = [{"round": 1}, {"pool": "mean"}, {"precision": "bf16"}]
    assert all(EmbeddingEngine(model, **other).identity() != known for other in others)
    torch.manual_seed(1)
    assert EmbeddingEngine(randomize(ProgResViT(model.config))).identity()["weights"] != known["weights"]


def test_bf16_is_close(model):
    pixels = random_pixels(model.config, 8)
    exact, rough = (stacked(EmbeddingEngine(model, precision=name).embed(pixels)) for name in ("fp32", "bf16"))
    cosine = (exact * rough).sum(axis=1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(rough, axis=1)
    assert cosine.min() > 0.99
    assert not np.array_equal(exact, rough)


def test_out_of_memory_halves_the_batch_remembers_it_and_says_so_once(model, monkeypatch):
    pixels = random_pixels(model.config, 20)
    expected = stacked(EmbeddingEngine(model).embed(pixels))
    run, sizes = Home._run, []

    def limited(self, batch):
        sizes.append(len(batch))
        if len(batch) > 5:
            raise torch.OutOfMemoryError
        return run(self, batch)

    monkeypatch.setattr(Home, "_run", limited)
    engine = EmbeddingEngine(model, batch=16)
    with pytest.warns(MemoryWarning, match="smaller batches") as caught:
        found = engine.embed(pixels)
    assert len(caught) == 1
    np.testing.assert_allclose(stacked(found), expected, atol=1e-5)
    assert engine.batch == 4
    assert sizes == [16, 8, 4, 4, 4, 4, 4]
    monkeypatch.setattr(Home, "_run", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError))
    with pytest.raises(MemoryError, match="single image"):
        engine.embed(pixels[:1])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda model: EmbeddingEngine(model, round=4), "there is no round 4; the rounds of this model are 1 to 3"),
        (lambda model: EmbeddingEngine(model, round=0), "there is no round 0"),
        (lambda model: EmbeddingEngine(model, pool="clas"), "unknown pool 'clas'; did you mean 'class'"),
        (lambda model: EmbeddingEngine(model, pool="max"), "unknown pool 'max'"),
        (lambda model: EmbeddingEngine(model, precision="fp16"), "fp16 needs a CUDA device"),
        (lambda model: EmbeddingEngine(model, precision="int8"), "unknown precision"),
        (lambda model: EmbeddingEngine(model).embed(b"content"), r"put this one into brackets: embed\(\[image\]\)"),
        (lambda model: list(EmbeddingEngine(model).stream(["image.png"])), "stream takes batches"),
        (lambda model: EmbeddingEngine(model).embed([3]), "or a PIL image, not int"),
        (lambda model: EmbeddingEngine(model).embed(np.zeros((1, 3, 8, 8), np.uint8)), "r at least 32"),
        (lambda model: Engine(model), "has no head, so it cannot classify; embed images with progresvit.Embedding"),
    ],
)
def test_bad_input_is_refused(model, make, match):
    with pytest.raises(ValueError, match=match):
        make(model)


def test_a_model_of_another_kind_is_refused_with_a_remedy():
    config = EarlyExitConfig(rounds=[{"resolution": 32, "blocks": 2}], heads=2, depth=2, patch_size=8, num_classes=3)
    with pytest.raises(ValueError, match=r"'progresvit' only, not 'early_exit'; call model\.features\(images\)"):
        EmbeddingEngine(EarlyExit(config))


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_once")
def test_an_export_is_refused(exports):
    with pytest.raises(ValueError, match="is an export, which gives answers and no features; give the model's folder"):
        EmbeddingEngine(exports("two rounds"))


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 0.2), ("fp16", 0.05)])
@pytest.mark.parametrize("pool", ["class", "mean"])
def test_a_gpu_gives_the_features_of_the_cpu(model, precision, tolerance, pool):
    pixels = random_pixels(model.config, 33)
    expected = stacked(EmbeddingEngine(model, pool=pool).embed(pixels))
    engine = EmbeddingEngine(model, pool=pool, device="cuda", precision=precision, batch=16)
    np.testing.assert_allclose(stacked(engine.embed(pixels)), expected, atol=tolerance)
    buffer = io.BytesIO()
    Image.fromarray(pixels[0].transpose(1, 2, 0)).resize((64, 64)).save(buffer, "PNG")
    found = engine.embed([buffer.getvalue(), b"torn"])
    assert [one.error is None for one in found] == [True, False]
