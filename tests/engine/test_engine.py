import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from progresvit import compute
from progresvit.data import evaluation_transform
from progresvit.data.transforms import normalise
from progresvit.engine import Engine, backends
from progresvit.engine.fold import FoldedRound
from progresvit.model import ProgResViT
from progresvit.routing import Abstention, SettingWarning, save_router, top10_entropy
from progresvit.routing.router import Router, RouterOrigin, router_hash
from tests.engine.conftest import LABELS
from tests.factories import setting_of


@pytest.fixture
def model(small_config, randomize):
    return randomize(ProgResViT(small_config.replace(labels=LABELS)))


@pytest.fixture
def images():
    torch.manual_seed(5)
    return torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8)


def all_rounds(model, images):
    """Logits of every round for every image, (B, S, K)."""
    with torch.no_grad():
        return torch.stack([output.logits for output in model(normalise(images, model.config))], dim=1)


def made_router(target="benefit", seed=0):
    torch.manual_seed(seed)
    router = Router(2, RouterOrigin(target=target, images=1, epochs=1, seed=0))
    torch.nn.init.normal_(router.after[0].layers[-1].weight, std=2.0)
    return router.eval().requires_grad_(False)


@pytest.mark.parametrize("quantile", [0.0, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_every_answer_is_that_of_the_round_after_which_the_image_exits(model, images, quantile, batch):
    logits = all_rounds(model, images)
    entropy = top10_entropy(logits[:, 0])
    threshold = {0.0: 0.0, 1.0: float("inf")}.get(quantile, entropy.double().quantile(quantile).item())
    found = Engine(model, threshold, batch=batch).classify(images)
    gmacs = compute.cumulative_gmacs(model.config)
    assert len(found) == 40
    for row, prediction in enumerate(found):
        s = 0 if entropy[row].double() < threshold else 1
        probabilities = logits[row, s].softmax(dim=-1)
        assert prediction.exit_round == s + 1
        assert prediction.gmacs == gmacs[s]
        assert prediction.index == int(probabilities.argmax())
        assert prediction.label == f"class {prediction.index}"
        assert prediction.probability == pytest.approx(probabilities.max().item(), abs=1e-4)
        assert prediction.entropy == pytest.approx(top10_entropy(logits[row, s][None]).item(), abs=1e-4)
        assert prediction.abstained is False
    assert {p.exit_round for p in found} == ({1, 2} if 0 < quantile < 1 else {1 if quantile else 2})


def test_paths_pil_images_and_tensors_give_the_same(model, tmp_path):
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (50, 70, 3), dtype=np.uint8)) for _ in range(3)]
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
    engine = Engine(model, 0.0)
    transform = evaluation_transform(model.config, as_bytes=True)
    from_tensor = engine.classify(torch.stack([transform(image) for image in images]))
    assert engine.classify(images) == from_tensor
    assert engine.classify([tmp_path / f"{number}.png" for number in range(3)]) == from_tensor
    assert engine.classify([]) == []


def test_a_learned_router_decides_in_place_of_entropy(model, images, tmp_path):
    router = made_router()
    logits = all_rounds(model, images)
    scores = router.score(0, logits[:, 0])
    threshold = scores.double().sort().values[len(scores) // 2 - 1 :][:2].mean().item()  # between two scores
    path = save_router(router, tmp_path / "router.safetensors")
    for given in (router, path):
        found = Engine(model, threshold, router=given).classify(images)
        assert [p.exit_round == 1 for p in found] == (scores.double() < threshold).tolist()


def test_unsure_answers_are_withheld_and_keep_their_guess(model, images):
    plain = Engine(model, 0.0).classify(images)
    limit = float(np.median([p.entropy for p in plain]))
    found = Engine(model, 0.0, abstain=limit).classify(images)
    assert [p.abstained for p in found] == [p.entropy >= limit for p in plain]
    assert 0 < sum(p.abstained for p in found) < 40
    assert [p.index for p in found] == [p.index for p in plain]


def test_unrecoverable_images_are_not_refined(model, images):
    router = made_router("unrecoverable", seed=3)
    chances = router.score(0, all_rounds(model, images)[:, 0]).double()
    limit = chances.quantile(0.6).item()
    found = Engine(model, 0.0, abstain=Abstention(unrecoverable=limit, router=router)).classify(images)
    assert [p.exit_round == 1 for p in found] == (chances >= limit).tolist()
    assert [p.abstained for p in found] == (chances >= limit).tolist()


def test_temperatures_change_the_stated_probability_alone(model, images):
    plain = Engine(model, 1.0).classify(images)
    soft = Engine(model, 1.0, temperatures=(4.0, 4.0)).classify(images)
    assert [(p.index, p.exit_round, p.entropy) for p in soft] == [(p.index, p.exit_round, p.entropy) for p in plain]
    assert all(a.probability < b.probability for a, b in zip(soft, plain))


def test_images_with_broken_logits_run_every_round(model, images):
    with torch.no_grad():
        model.head.bias[3] = torch.nan
    found = Engine(model, float("inf")).classify(images[:3])
    assert [(p.exit_round, p.index, p.label) for p in found] == [(2, -1, None)] * 3


def test_a_setting_is_used_for_its_own_model_in_silence(model, images, tmp_path):
    setting = setting_of(model)
    setting.save(tmp_path / "t.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Engine(model, threshold=str(tmp_path / "t.json")).classify(images)
    assert found == Engine(model, setting).classify(images) == Engine(model, 1.5).classify(images)


def test_a_certificate_does_not_hold_for_another_model_preprocessing_or_precision(model):
    setting = setting_of(model)
    with pytest.warns(SettingWarning, match="other precision: the certificate does not hold here"):
        Engine(model, setting, precision="bf16")
    cropped = ProgResViT(model.config.replace(crop=1.0))
    cropped.load_state_dict(model.state_dict())
    with pytest.warns(SettingWarning, match="other preprocessing: the certificate does not hold"):
        Engine(cropped, setting)
    with torch.no_grad():
        model.head.bias += 1e-3
    with pytest.raises(ValueError, match=r"for a model with other weights, and .* itself as the threshold: 1\.5$"):
        Engine(model, setting)
    assert Engine(model, setting.threshold).policy.thresholds == (1.5,)


def test_a_setting_for_a_router_needs_that_router(model):
    router = made_router()
    setting = setting_of(model, router=router_hash(router))
    Engine(model, setting, router=router)
    with pytest.raises(ValueError, match="for the probabilities of a learned router; give the router"):
        Engine(model, setting)
    with pytest.raises(ValueError, match="but not of the one that was given"):
        Engine(model, setting, router=made_router(seed=9))
    with pytest.raises(ValueError, match="is for entropies"):
        Engine(model, setting_of(model), router=router)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda model: Engine(model, -0.5), "0 .* or more, not -0.5"),
        (lambda model: Engine(model, (0.1, 0.2)), "so 1 for 2 rounds, not 2"),
        (lambda model: Engine(model, 0.5, precision="fp16"), "fp16 needs a CUDA device"),
        (lambda model: Engine(model, 0.5, temperatures=(1.0,)), "2 numbers above 0"),
        (lambda model: Engine(model, 0.5, temperatures=(1.0, 0.0)), "2 numbers above 0"),
        (lambda model: Engine(model, 0.5, abstain=-1), "0 or more"),
        (lambda model: Engine(model, "missing/none.json"), "no setting at"),
        (lambda model: Engine(model, setting_of(model, rounds=3)), "for a model of 3 rounds, and this model has 2"),
        (lambda model: Engine(ProgResViT(model.config.replace(num_classes=0, labels=None)), 0.5), "has no head"),
        (lambda model: Engine(model, 0.5, top_k=13), "top_k must be at most 12, the classes of the model, got 13"),
        (lambda model: Engine(model, 0.5).classify([3]), "or a PIL image, not int"),
        (lambda model: Engine(model, 0.5).classify(b"content"), r"classify\(\[image\]\)"),
        (lambda model: Engine(model, 0.5).submit("cat.jpg"), r"submit\(\[image\]\)"),
        (lambda model: Engine(model, 0.5, backend="tflite"), "unknown backend 'tflite'; choose one of torch"),
        (lambda model: Engine(model, 0.5, kernels="fused"), "for a GPU, not for cpu"),
        (lambda model: Engine(model, 0.5, kernels="fast"), "choose one of fused, plain"),
        (lambda model: Engine(model, 0.5, precision="fp8"), "fp8 needs a GPU"),
        (lambda model: Engine(model, 0.5, precision="fp4"), "unknown precision 'fp4'"),
    ],
)
def test_bad_input_is_refused(model, make, match):
    with pytest.raises(ValueError, match=match):
        make(model)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda images: images.float(), "uint8"),
        (lambda images: images[..., :30], r"r at least 32, .* shape \(40, 3, 32, 30\)"),
    ],
)
def test_other_tensors_than_square_bytes_are_refused(model, images, change, match):
    with pytest.raises(ValueError, match=match):
        Engine(model, 0.5).classify(change(images))


def test_temperatures_change_no_answer_in_bfloat16(model, images, monkeypatch):
    logits = (torch.randn(40, 12) * 3).bfloat16()
    logits[:, 1] = logits[:, 0]  # ties and near ties are where a division in bfloat16 would decide otherwise
    many = torch.cat([logits, (logits.float() * 1.004).bfloat16()])
    forward = FoldedRound.forward

    def rough(self, images, previous=None):
        return forward(self, images, previous)._replace(logits=many[: len(images)])

    monkeypatch.setattr(FoldedRound, "forward", rough)
    plain = Engine(model, float("inf")).classify(images)
    for temperature in (0.37, 1.37, 3.3):
        scaled = Engine(model, float("inf"), temperatures=(temperature, 1.0)).classify(images)
        assert [p.index for p in scaled] == [p.index for p in plain]


def test_a_router_of_another_model_warns(model):
    router = made_router()
    router.origin = RouterOrigin(target="benefit", images=1, epochs=1, seed=0, model_sha256="of another")
    with pytest.warns(SettingWarning, match="fitted on another model's records"):
        Engine(model, 0.5, router=router)


@pytest.mark.parametrize("abstain", [np.float32(0.5), torch.tensor(0.5), 1])
def test_any_number_will_do_to_abstain_by(model, abstain):
    assert Engine(model, 0.5, abstain=abstain).policy.abstention.entropy == float(abstain)


def test_an_engine_has_routers_of_its_own(model, images):
    router = made_router()
    scores = router.score(0, all_rounds(model, images)[:, 0]).double()
    engine = Engine(model, scores.median().item(), router=router)
    before = engine.classify(images)
    for parameter in router.parameters():
        torch.nn.init.zeros_(parameter)
    assert engine.classify(images) == before


def test_an_engine_merges_tokens_as_its_model_does(model, images):
    setting = setting_of(model)
    model.set_merge([1, 5])
    logits = all_rounds(model, images)
    entropy = top10_entropy(logits[:, 0]).double().sort().values
    threshold = (entropy[19] + entropy[20]).item() / 2
    found = Engine(model, threshold, batch=16).classify(images)
    assert {prediction.exit_round for prediction in found} == {1, 2}
    for row, prediction in enumerate(found):
        expected = logits[row, prediction.exit_round - 1].softmax(dim=-1)
        assert prediction.probability == pytest.approx(expected.max().item(), abs=1e-4)
        assert prediction.gmacs == model.gmacs()[prediction.exit_round - 1]
    with pytest.raises(ValueError, match="other weights"):  # thresholds do not hold across merging
        Engine(model, setting)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_a_model_that_merges_tokens_runs_plain_kernels_on_a_gpu():
    gpu = torch.device("cuda")
    assert backends._choose_kernels(None, gpu, "fp32", merges=True) == "plain"
    for kernels, precision in (("fused", "fp32"), (None, "fp8")):
        with pytest.raises(ValueError, match="not available for a model that merges tokens; use kernels='plain'"):
            backends._choose_kernels(kernels, gpu, precision, merges=True)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_a_gpu_without_triton_warns_that_it_will_be_slower(monkeypatch):
    assert backends._choose_kernels(None, torch.device("cpu"), "fp32") == "plain"
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="triton is not installed, so the engine runs plain kernels"):
        assert backends._choose_kernels(None, torch.device("cuda"), "fp32") == "plain"
    with pytest.raises(ValueError, match="fused kernels need triton"):
        backends._choose_kernels("fused", torch.device("cuda"), "fp32")
