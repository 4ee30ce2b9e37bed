"""Two processes under torchrun against one that takes two turns, for every task that draws, averages or orders.

The runs of two processes share one start of torchrun, which would take most of the time of each.
"""

from types import SimpleNamespace

import pytest

from progresvit.training.logger import read_log
from tests.processes import run_together
from tests.training.runs import losses, recipe, run
from tests.training.test_dino import dino
from tests.training.test_dynabert import distilled, write_start
from tests.training.test_subnetworks import baseline

pytestmark = pytest.mark.slow

SCHEDULE = {"epochs": 2, "cooldown": 0, "warmup": 1}
ONE_EPOCH = {"epochs": 1, "cooldown": 0, "warmup": 0}


@pytest.fixture(scope="module")
def runs(digits, tmp_path_factory, randomize):
    """By task, the folders of a run of this process in two turns and of a run of two processes."""
    root = tmp_path_factory.mktemp("processes")
    start = write_start(root / "start", randomize)
    recipes = {
        "supervised": lambda **turns: recipe(schedule=SCHEDULE, **turns),
        "subnetworks": lambda **turns: baseline("hydravit", schedule=SCHEDULE, **turns),
        "dynabert": lambda **turns: distilled(start, schedule=ONE_EPOCH, **turns),
        "dino": lambda **turns: dino(schedule=SCHEDULE, **turns),
    }
    commands = []
    for task, make in recipes.items():
        (root / f"{task}.yaml").write_text(make().to_yaml())
        out = root / "together" / task
        commands.append(["train", root / f"{task}.yaml", "--data", digits, "--out", out, "--device", "cpu"])
    done = run_together(*commands)
    assert done.returncode == 0, done.stderr
    for task, make in recipes.items():
        run(make(optimizer={"accumulate": 2}), digits, root / "alone" / task)
    return {task: SimpleNamespace(alone=root / "alone" / task, together=root / "together" / task) for task in recipes}


def both_losses(folders):
    """The losses of every step: of one process alone, and of two together."""
    return [
        (alone, together)
        for (_, alone, _), (_, together, _) in zip(losses(folders.alone), losses(folders.together), strict=True)
    ]


def test_two_processes_learn_what_one_learns_in_two_turns(runs):
    alone, together = losses(runs["supervised"].alone), losses(runs["supervised"].together)
    assert [step for step, *_ in alone] == [step for step, *_ in together] == list(range(1, 7))
    for alone, together in both_losses(runs["supervised"]):
        assert alone == pytest.approx(together, abs=1e-5)


def test_two_processes_draw_the_rounds_that_one_draws_in_two_turns(runs):
    for alone, together in both_losses(runs["subnetworks"]):
        assert alone == pytest.approx(together, abs=1e-5)


def test_two_processes_agree_on_the_order_of_heads_and_neurons(runs):
    """Although each has its own batches."""
    assert len(both_losses(runs["dynabert"])) == 3
    for alone, together in both_losses(runs["dynabert"]):
        assert alone == pytest.approx(together, abs=1e-5)


def test_two_processes_share_the_centre_of_dino_and_the_images_of_its_validation(runs):
    for alone, together in both_losses(runs["dino"]):
        assert alone == pytest.approx(together, abs=1e-4)
    alone, together = (
        [line["knn"] for line in read_log(folder) if line["event"] == "evaluation"]
        for folder in (runs["dino"].alone, runs["dino"].together)
    )
    assert alone == [pytest.approx(knn, abs=1 / 24) for knn in together]
