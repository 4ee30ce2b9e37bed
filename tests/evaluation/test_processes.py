"""Two processes under torchrun give the records of one; their commands share one start of torchrun."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from progresvit.evaluation import DataSource, EvalOptions, evaluate_linear, read_records, read_segmentation_records
from progresvit.model.saving import save
from tests.evaluation.made import ONE
from tests.evaluation.made_segmentation import make_dataset
from tests.evaluation.made_segmentation import make_model as make_segmenter
from tests.evaluation.test_run import make_model as make_classifier
from tests.evaluation.test_run import run as classify_alone
from tests.evaluation.test_segmentation_run import run as segment_alone
from tests.evaluation.test_segmentation_run import same
from tests.processes import run_together

pytestmark = pytest.mark.slow

LINEAR = ("--task", "linear", "--epochs", 3, "--blocks", 2, "--learning-rates", "0.03,0.3", "--batch", 20)
IN_MEMORY = ("--in-memory", "--batch", 21)
CHUNKS = {"progresvit.evaluation.parts.CHUNK": 7, "progresvit.evaluation.run.MASK_CHUNK": 2}
"""Small parts, so that each process has several."""


@pytest.fixture(scope="module")
def evaluated(digits, tmp_path_factory, randomize):
    """Digits and shapes evaluated by two processes, and at last shapes with labels that the model does not know."""
    root = tmp_path_factory.mktemp("processes")
    classifier, segmenter, shapes = make_classifier(randomize), make_segmenter(randomize), make_dataset(root / "shapes")
    models = save(classifier, root / "classifier"), save(segmenter, root / "segmenter")
    wrong = shutil.copytree(shapes, root / "wrong")
    for mask in (wrong / "annotations" / "val").iterdir():
        Image.fromarray(np.full_like(np.asarray(Image.open(mask)), 11)).save(mask)
    options = ("--workers", 0, "--device", "cpu", "--out")
    done = run_together(
        ["evaluate", models[0], "--data", digits, *options, root / "digits.parquet"],
        ["evaluate", models[1], "--data", shapes, "--batch", 1, *options, root / "shapes.parquet"],
        ["evaluate", models[0], "--data", digits, *LINEAR, *options, root / "linear.parquet"],
        ["evaluate", models[0], "--data", digits, *LINEAR, *IN_MEMORY, *options, root / "memory.parquet"],
        ["evaluate", models[1], "--data", wrong, *options, root / "wrong.parquet"],
        constants=CHUNKS,
    )
    return SimpleNamespace(root=root, shapes=shapes, classifier=classifier, segmenter=segmenter, done=done)


def test_two_processes_share_the_images(evaluated, digits, tmp_path):
    assert evaluated.done.stdout.count("digits.parquet is ready") == 1, evaluated.done.stderr
    one = classify_alone(evaluated.classifier, digits, tmp_path / "one.parquet")
    two = read_records(evaluated.root / "digits.parquet")
    assert np.array_equal(one.ids, two.ids)
    assert one.statistics == pytest.approx(two.statistics, abs=1e-4)


def test_two_processes_segment_as_one_does(evaluated, tmp_path):
    assert evaluated.done.stdout.count("shapes.parquet is ready") == 1, evaluated.done.stderr
    one = segment_alone(evaluated.segmenter, evaluated.shapes, tmp_path / "one.parquet")
    same(read_segmentation_records(evaluated.root / "shapes.parquet"), one)


def test_two_processes_train_the_linear_probe_of_one(evaluated, digits, tmp_path):
    assert evaluated.done.stdout.count("linear.parquet is ready") == 1, evaluated.done.stderr
    source, options = DataSource(data=str(digits)), EvalOptions(workers=0, batch=20)
    settings = {"epochs": 3, "blocks": 2, "learning_rates": (0.03, 0.3), "options": options}
    one = evaluate_linear(evaluated.classifier, source, tmp_path / "one.parquet", name="m", processes=ONE, **settings)
    two = read_records(evaluated.root / "linear.parquet")
    assert one.header.probe == two.header.probe
    assert one.header.probe_result == two.header.probe_result
    assert np.array_equal(one.ids, two.ids)
    assert one.statistics == pytest.approx(two.statistics, abs=1e-4)
    assert not list(evaluated.root.glob("linear.parquet.*"))


def test_processes_with_images_in_memory_are_named(evaluated):
    about = read_records(evaluated.root / "memory.parquet").header.probe
    assert (about["processes"], about["batch"]) == (2, 20)
    assert "processes" not in read_records(evaluated.root / "linear.parquet").header.probe


def test_an_error_ends_both_processes_and_leaves_no_records(evaluated):
    assert evaluated.done.returncode != 0
    assert "has pixels of value 11" in evaluated.done.stderr
    assert not (evaluated.root / "wrong.parquet").exists()
