"""Results files as they are read, and what is refused of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from repro.formats import flags_of, read_measurement, to_json
from repro.store import read_results
from tests.repro.made import change, log_losses, measured
from tests.repro.made_segmentation import write_segmentation

TRACKED = Path(__file__).parents[2] / "repro" / "results"


def test_every_measurement_is_read(made):
    results = read_results(made)
    assert len(results.runs) == 6
    assert list(results.routing) == ["routing"]
    assert set(results.shift) == {"shift", "shift_both-full", "shift_both-plain"}
    assert len(results.all) == 10


def test_bits_are_read_as_they_were_written(made):
    assert (read_results(made).runs["full-1"].rounds.correct(40) == measured("full", 40, 1)[1]).all()
    for count in (1, 7, 8, 9):
        padded = np.pad(np.ones(count, bool), (0, -count % 8))
        assert flags_of(padded, count).tolist() == [True] * count
    with pytest.raises(ValueError, match="32 bits for 40 images"):
        flags_of(np.zeros(32, bool), 40)


def test_log_losses_are_read_as_float16(tested):
    full = read_results(tested).runs["full-1"]
    assert full.rounds.log_losses(200) == pytest.approx(log_losses("full", 200, 1), rel=2**-11)
    assert len(json.loads(to_json(full))["rounds"]["log_loss"][0]) < 2.7 * 200 + 4  # two bytes in base64
    with pytest.raises(ValueError, match="200 values for 4 images"):
        full.rounds.log_losses(4)


def test_files_without_log_loss_and_heads_have_none(made, tested):
    assert read_results(made).runs["full-1"].rounds.log_losses(40) is None
    assert "log_loss" not in (made / "full-1.json").read_text()
    widths = read_results(tested).runs["widths-1"]
    assert (widths.rounds.heads, widths.near_lossless, widths.frontier) == (None, None, ())
    assert json.loads(to_json(widths)) == json.loads((tested / "widths-1.json").read_text())


def test_routing_results_of_earlier_versions_are_read(made):
    def age(values):
        values.pop("rejection")
        for setting in values["settings"]:
            setting["halves"] = {**setting["halves"], "broken": 1}
            for key in ("harm", "disagreement"):
                setting["halves"].pop(key)
            for key in ("draws", "loss"):
                setting.pop(key)
        for row in values["equal_accuracy"]:
            for key in ("errors_added", "saving_added"):
                row.pop(key)

    path = made / "routing.json"
    text = path.read_text()
    try:
        change(path, age)
        old = read_measurement(path)
    finally:
        path.write_text(text)
    assert (old.settings[1].draws, old.settings[1].halves.broken, old.rejection) == (None, 1, ())


def flip_a_bit(values):
    first = values["rounds"]["bits"][0]
    values["rounds"]["bits"][0] = f"{int(first[0], 16) ^ 8:x}{first[1:]}"


BROKEN = {
    "epochs: Field required": lambda values: values.pop("epochs"),
    "machine.jobs: Field required": lambda values: values["machine"].pop("jobs"),
    "data.colour: unknown key": lambda values: values["data"].update(colour="red"),
    "rounds: right and bits disagree": flip_a_bit,
    "calls itself full-7; rename the file to full-7.json": lambda values: values.update(name="full-7"),
    "near_lossless.top1: input should be less than or equal to 1": lambda values: values["near_lossless"].update(
        top1=88.5
    ),
    "near_lossless.top1: input should be a finite number": lambda values: values["near_lossless"].update(
        top1=float("nan")
    ),
    "its kind is 'walk', not run, segmentation, routing, shift, cost": lambda values: values.update(kind="walk"),
    "does not hold a measurement: its kind is []": lambda values: values.update(kind=[]),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_file_is_refused_with_its_name_and_what_is_wrong(folder, message):
    change(folder / "full-1.json", BROKEN[message])
    with pytest.raises(ValueError, match=r"full-1\.json") as error:
        read_results(folder)
    assert message in str(error.value)
    assert "Value error" not in str(error.value)


def test_pixels_that_no_confusion_matrix_has_are_refused(tmp_path):
    folder = write_segmentation(tmp_path / "results")
    change(folder / "ours-1.json", lambda values: values["test"].update(labelled=[1000, 1, 0] * 60))
    with pytest.raises(ValueError, match="an image has other numbers of labelled and predicted pixels"):
        read_measurement(folder / "ours-1.json")


@pytest.mark.parametrize(
    ("edit", "layout"),
    [
        (lambda values: values.update(format=0), "0"),
        (lambda values: values.update(format=2), "2"),
        (lambda values: values.pop("format"), "None"),
    ],
)
def test_a_file_of_another_layout_is_refused_with_what_to_do(folder, edit, layout):
    change(folder / "full-1.json", edit)
    with pytest.raises(ValueError, match=rf"full-1\.json has format {layout} and this version reads format 1") as error:
        read_results(folder)
    assert "delete it and measure again" in str(error.value)
    assert "revision abc1234" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[1]", "does not hold a measurement"), ("\0", "not JSON")]
)
def test_a_file_without_measurement_is_refused(folder, text, message):
    (folder / "full-1.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_results(folder)


def test_a_folder_without_results_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="holds no results"):
            read_results(folder)
