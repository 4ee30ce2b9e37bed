"""The costs of a frontier on a CPU, with recorded exits."""

import shutil

import pytest
import torch
from frontier_cpu import ReplayedPoint, main, sample_exits

from repro.frontier import points_of
from repro.store import read_results
from tests.repro.made import change
from tests.repro.made_frontier import write_frontier

MODELS = {
    "full": {"resolutions": [16, 32], "heads": [1, 2], "depth": 2, "patch_size": 8},
    "plain": {"resolutions": [32], "heads": [2], "depth": 2, "patch_size": 8, "psg": False},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A frontier of a routed and a plain model; recipes have small models. No test may change it."""
    folder = write_frontier(tmp_path_factory.mktemp("written") / "results", seeds=(1, 2), cost=False)
    keep = {"full", "plain"}
    for path in folder.glob("*.json"):
        run = path.stem.rpartition("-")[0]
        if run not in keep:
            path.unlink()
        else:
            change(path, lambda values, run=run: values["recipe"].update(model={"heads": None} | MODELS[run]))
    return folder


@pytest.fixture
def results(written, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(written, tmp_path / "results")


class CountedRounds:
    """Counts the images that each round runs on, and checks that tokens stay with their images."""

    def __init__(self, model):
        self.config, self.counts = model.config, [0] * len(model.config.rounds)
        self.model = model

    def run_round(self, s, images, *, previous=None):
        self.counts[s] += len(images)
        output = self.model.run_round(s, images, previous=previous)
        marks = images[:, 0, 0, 0]
        if previous is not None:
            assert torch.equal(previous[:, 0, 0], marks)
        output.tokens[:, 0, 0] = marks
        return output


def test_images_exit_as_recorded(results, small_model):
    result = read_results(results).runs["full-1"]
    for point in points_of(result):
        model = CountedRounds(small_model)
        subject = ReplayedPoint(model, point, images=50, batch=8)
        subject.run(2)
        exits = sample_exits(point, 50)
        assert model.counts == [100, 2 * (exits > 0).sum()]
        assert subject.gmacs(result) == pytest.approx(point.gmacs, rel=0.05)
        for number in range(50):
            subject.one(number)
        assert model.counts == [150, 3 * (exits > 0).sum()]


def test_shares_of_exits_are_those_of_all_images(results):
    result = read_results(results).runs["full-1"]
    point = points_of(result)[2]
    exits = sample_exits(point, 50)
    continuing = (point.exit_after > 0).mean()
    assert 0.2 < continuing < 0.8
    for part in (exits, exits[:10], exits[25:35]):
        assert abs((part > 0).mean() - continuing) <= 1.5 / len(part)


def test_every_measured_run_has_costs_and_is_not_measured_twice(results, capsys):
    arguments = [str(results), "--images", "6", "--batch", "4", "--seconds", "0.001", "--threads", "1"]
    main(arguments)
    printed = capsys.readouterr().out
    assert "plain160: seed 1 is not measured yet" in printed
    found = read_results(results)
    cost = found.cost["cost_cpu"]
    names = [point.name for point in points_of(found.runs["full-1"])]
    assert [(point.run, point.point) for point in cost.points] == [
        *(("full", name) for name in names),
        ("plain", "the model"),
    ]
    assert all(point.images_per_s > 0 and point.latency_ms > 0 and point.joules is None for point in cost.points)
    main(arguments)
    assert read_results(results).cost["cost_cpu"] == cost
    assert not any(line.startswith(("full:", "plain:")) for line in capsys.readouterr().out.splitlines())


def test_costs_of_other_conditions_are_not_mixed(results):
    arguments = [str(results), "--images", "6", "--batch", "4", "--seconds", "0.001", "--threads", "1"]
    main(arguments)
    before = (results / "cost_cpu.json").read_text()
    with pytest.raises(
        SystemExit, match=r"cost_cpu\.json holds costs of other conditions \(.*, 1, fp32, 4, .*move it away"
    ):
        main([*arguments, "--batch", "2"])
    assert (results / "cost_cpu.json").read_text() == before


def test_a_folder_without_a_study_or_another_frontier_is_refused(results, tmp_path):
    with pytest.raises(SystemExit, match=r"error: .* has no study\.yaml"):
        main([str(tmp_path)])
    with pytest.raises(SystemExit, match="error: the study has no frontier 'al', did you mean 'all'"):
        main([str(results), "--frontier", "al"])
