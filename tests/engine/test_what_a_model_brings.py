"""What an engine takes from the folder of its model, and how many classes it names."""

import warnings

import numpy as np
import pytest
import torch

import progresvit
from progresvit.data.transforms import normalise
from progresvit.distributed import Processes
from progresvit.engine import Candidate, Engine
from progresvit.evaluation import DataSource, evaluate, measure_budgets
from progresvit.io import model_folder
from progresvit.model import ProgResViT
from progresvit.routing import OODRule, find_setting
from progresvit.routing.decide import Policy, decide
from tests.factories import digits_config, setting_of

pytestmark = pytest.mark.usefixtures("graphs_once")


@pytest.fixture
def images(small_config):
    return torch.randint(0, 256, (40, 3, small_config.input_side, small_config.input_side), dtype=torch.uint8)


@pytest.fixture
def folder(small_model, tmp_path):
    """A model with settings of its own."""
    made = progresvit.save(small_model, tmp_path / "model")
    (made / "settings").mkdir()
    for name, threshold, abstain in (("near-lossless", 2.1, None), ("sloppy", 3.0, None), ("careful", 2.1, 2.0)):
        setting_of(small_model, threshold=threshold, abstain=abstain).save(made / "settings" / f"{name}.json")
    return made


def test_a_models_own_settings_are_used_by_name_in_silence(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Engine(folder).policy.thresholds == (2.1,)
        assert Engine(folder, "sloppy").policy.thresholds == (3.0,)
        assert Engine(folder, 0.5).policy.thresholds == (0.5,)
    assert Engine(folder, "sloppy").setting.threshold == 3.0
    assert Engine(folder, 0.5).setting is None


def test_saving_a_model_again_keeps_its_settings_and_they_are_refused_if_it_has_changed(folder, small_model):
    with torch.no_grad():
        small_model.head.weight += 1
    progresvit.save(small_model, folder)
    for setting in (None, "sloppy"):
        with pytest.raises(ValueError, match="other weights"):
            Engine(folder, setting)
    assert Engine(folder, 3.0).setting is None


def test_a_setting_may_bring_when_to_abstain_and_a_number_wins_over_it(folder, images):
    careful = Engine(folder, "careful")
    assert careful.policy.abstention.entropy == 2.0
    assert Engine(folder, "careful", abstain=1.0).policy.abstention.entropy == 1.0
    assert [one.abstained for one in careful.classify(images)] == [
        one.entropy >= 2.0 for one in Engine(folder).classify(images)
    ]


def test_a_loaded_model_has_no_folder_to_look_in(folder):
    with pytest.raises(ValueError, match="no setting 'sloppy'"):
        Engine(progresvit.load(folder), "sloppy")


def test_a_budget_is_kept_on_the_images_that_it_was_measured_on(digits, tmp_path, randomize):
    model = randomize(ProgResViT(digits_config()))
    made = progresvit.save(model, tmp_path / "model")
    source = DataSource(data=str(digits), split="val")
    processes = Processes(0, 1, torch.device("cpu"))
    measure_budgets(evaluate(model, source, tmp_path / "r.parquet", name="m", processes=processes)).save(
        made / "budgets.json"
    )
    first, last = progresvit.compute.cumulative_gmacs(model.config)
    budget = first + 0.4 * (last - first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Engine(made, budget_gmacs=budget)
    spent = np.mean([one.gmacs for one in engine.classify(sorted((digits / "val").rglob("*.png")))])
    assert budget - (last - first) / 12 <= spent <= budget + 1e-9
    with pytest.raises(ValueError, match="give one of them"):
        Engine(made, 0.5, budget_gmacs=budget)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_several_classes_are_named_in_order_on_every_backend(small_model, images, backend):
    if backend != "torch":
        pytest.importorskip("onnxscript")
    one, three = (Engine(small_model, 2.1, backend=backend, top_k=k).classify(images) for k in (1, 3))
    logits = [output.logits for output in small_model(normalise(images, small_model.config))]
    for number, (alone, several) in enumerate(zip(one, three)):
        assert alone.top == ()
        assert (alone.index, alone.exit_round) == (several.index, several.exit_round)
        expected = logits[several.exit_round - 1][number].softmax(dim=-1).topk(3)
        assert [candidate.index for candidate in several.top] == expected.indices.tolist()
        assert [candidate.probability for candidate in several.top] == pytest.approx(expected.values.tolist(), abs=1e-4)
        assert several.top[0] == Candidate(index=several.index, label=several.label, probability=several.probability)


def test_no_class_is_named_where_logits_are_not_finite():
    logits = np.array([[0.0, 2.0, 1.0], [np.nan, 0.0, 0.0]], np.float32)
    answers = decide(Policy.make(2, 0.5), 1, logits, top_k=2)
    assert answers.classes.tolist() == [[1, 2], [-1, -1]]
    assert np.isnan(answers.probabilities[1]).all()
    assert answers.index.tolist() == [1, -1]


@pytest.fixture
def bundled(folder, monkeypatch):
    """As if the package brought this model under every name."""
    asked = []

    def bundled_folder(name=model_folder.DEFAULT_MODEL):
        asked.append(name)
        return folder

    monkeypatch.setattr(model_folder, "bundled_folder", bundled_folder)
    monkeypatch.setattr("progresvit.api.bundled_folder", bundled_folder)
    return asked


def test_a_bundled_model_is_there_by_name_and_by_default(bundled, folder, small_model, images):
    names = (None, "imagenet-tiny", "nettewoof-tiny", "shipped")
    for name in names:
        assert torch.equal(progresvit.load(name).head.weight, small_model.head.weight)
    assert bundled == ["imagenet-tiny", *names[1:]]
    expected = Engine(folder).classify(images)
    assert all(Engine(name).classify(images) == expected for name in names)


@pytest.mark.parametrize("name", ["imagenet-tiny", "shipped"])
def test_a_local_folder_comes_before_the_name_but_not_before_the_default(
    bundled, tmp_path, monkeypatch, randomize, name
):
    other = randomize(ProgResViT(progresvit.load().config.replace(num_classes=3)))
    progresvit.save(other, tmp_path / "here" / name)
    monkeypatch.chdir(tmp_path / "here")
    assert progresvit.load(name).config.num_classes == 3
    assert progresvit.load().config.num_classes == 12
    assert Engine().config.num_classes == 12


@pytest.fixture
def ood_rule(folder, images):
    """A limit that rejects some of the images, away from all of their scores."""
    setting = find_setting("near-lossless", folder)
    every = OODRule(score="max-logit", limit=1e9, share=0.05)
    predictions = Engine(folder, setting.model_copy(update={"ood": every})).classify(images)
    assert all(one.out_of_distribution and one.abstained for one in predictions)
    scores = sorted(one.ood_score for one in predictions)
    return every.model_copy(update={"limit": (scores[11] + scores[12]) / 2})


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "onnxruntime", "openvino"])
def test_a_setting_may_bring_a_limit_for_images_of_no_class(folder, images, ood_rule, backend):
    plain, setting = Engine(folder), find_setting("near-lossless", folder).model_copy(update={"ood": ood_rule})
    setting.save(folder / "settings" / "ood.json")
    found = Engine(folder, "ood", backend=backend).classify(images)
    assert [one.out_of_distribution for one in found] == [one.ood_score < ood_rule.limit for one in found]
    assert sum(one.out_of_distribution for one in found) == 12
    assert [one.abstained for one in found] == [one.out_of_distribution for one in found]
    assert [one.exit_round for one in found] == [one.exit_round for one in plain.classify(images)]
    assert not any(one.out_of_distribution for one in plain.classify(images))
    assert all(one.ood_score is None for one in plain.classify(images))
    assert "ood" not in plain.identity()
    assert Engine(folder, "ood").identity()["ood"]["limit"] == ood_rule.limit
    careful = Engine(folder, "ood", abstain=0.0).classify(images)
    assert all(one.abstained for one in careful)
    assert sum(one.out_of_distribution for one in careful) == 12


@pytest.mark.slow
def test_an_export_brings_the_limit_of_its_setting(folder, images, ood_rule, tmp_path):
    from progresvit.engine.export.export import export

    setting = find_setting("near-lossless", folder).model_copy(update={"ood": ood_rule})
    export(progresvit.load(folder), tmp_path / "export", threshold=setting)
    engine = Engine(tmp_path / "export")
    assert engine.policy.ood == ood_rule
    assert sum(one.out_of_distribution for one in engine.classify(images)) == 12
