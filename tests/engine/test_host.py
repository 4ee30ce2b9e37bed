"""The host of docs/deploy.md: extracted from the page, and compared with the engine."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import progresvit
from progresvit.data.samples import samples_folder
from progresvit.engine.export.export import export
from tests.engine.conftest import CONFIGS

PAGE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"^```python\n(# host\.py\n.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def check_host(folder, model, threshold, paths, tmp_path):
    """The rounds after which the images exit; answers of the host are those of the engine."""
    (tmp_path / "host.py").write_text(CODE, encoding="utf-8")
    command = [sys.executable, "-I", tmp_path / "host.py", folder, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    answers = progresvit.Engine(model, threshold).classify(paths)
    assert [row[0] for row in rows] == [str(path) for path in paths]
    assert [row[1:3] for row in rows] == [[a.label or str(a.index), str(a.exit_round)] for a in answers]
    np.testing.assert_allclose([float(row[3]) for row in rows], [a.entropy for a in answers], atol=1e-4)
    return {a.exit_round for a in answers}


@pytest.mark.long
@pytest.mark.usefixtures("graphs_once")
def test_the_host_of_the_guide_answers_as_the_engine(tmp_path):
    model, paths = progresvit.load("nettewoof-tiny"), sorted(samples_folder().glob("*.jpg"))
    export(model, tmp_path / "exported", threshold=0.5)
    assert check_host(tmp_path / "exported", model, 0.5, paths, tmp_path) == {1, 2}


@pytest.mark.long
@pytest.mark.usefixtures("graphs_once")
def test_the_host_of_the_guide_takes_images_of_any_shape_and_a_threshold_for_each_round(models, tmp_path):
    model, rng, paths = models["three rounds"], np.random.default_rng(0), []
    for number, size in enumerate([(35, 49), (49, 35), (64, 61), (36, 36), (37, 90), (33, 500)]):
        patches = Image.fromarray(rng.integers(0, 256, (5, 4, 3), dtype=np.uint8))
        exif = Image.Exif()
        exif[274] = number + 1  # the orientation
        paths.append(tmp_path / f"{number}.png")
        patches.resize(size, Image.Resampling.NEAREST).save(paths[-1], exif=exif)
    entropies = [answer.entropy for answer in progresvit.Engine(model, np.inf).classify(paths)]
    thresholds = (float(np.median(entropies)), 0.0)
    export(model, tmp_path / "exported", threshold=thresholds)
    assert check_host(tmp_path / "exported", model, thresholds, paths, tmp_path) == {1, 3}
    export(model, tmp_path / "without")
    assert check_host(tmp_path / "without", model, 0.0, paths[:1], tmp_path) == {3}
    assert CONFIGS["three rounds"].labels is None
