from dataclasses import fields

import numpy as np

from progresvit.engine.prediction import Prediction, PredictionMaker
from progresvit.routing.decide import Answers


def test_predictions_made_in_bulk_are_those_of_the_constructor():
    zeros, no = np.zeros(3, np.float32), np.zeros(3, bool)
    answers = Answers(~no, np.array([[2], [0], [-1]]), zeros[:, None] + 0.5, zeros + 0.25, no, no, zeros)
    make = PredictionMaker(["a", "b", "c"], [0.5, 2.0], 1, has_ood=False)
    first, last = make(1, answers, np.array([0, 2]))
    rest = {"probability": 0.5, "exit_round": 2, "entropy": 0.25, "gmacs": 2.0, "abstained": False}
    assert first == Prediction(index=2, label="c", **rest)
    assert last == Prediction(index=-1, label=None, **rest)
    assert set(vars(first)) == {field.name for field in fields(Prediction)}  # none is forgotten
