"""The costs of a frontier on a GPU: what can be tested without one."""

import sys
from types import SimpleNamespace

import pytest
import torch
from frontier import CompiledPoint, EnergyCounter

from repro.frontier import FrontierPoint


class FakeRound:
    """Entropy and tokens of an image are its number, which its pixels hold."""

    def __init__(self, log, s):
        self.log, self.s = log, s

    def __call__(self, images, previous):
        numbers = images[:, 0, 0, 0]
        if previous is not None:
            assert torch.equal(previous, numbers)
        self.log.append((self.s, numbers.tolist()))
        self.entropy, self.tokens, self.answers = numbers.clone(), numbers.clone(), numbers[0]


def point(threshold, s=None):
    return FrontierPoint(name="50 %", round=s, threshold=threshold, gmacs=1.0, exit_after=None, correct=None)


@pytest.fixture
def numbered():
    return torch.arange(10.0).reshape(10, 1, 1, 1)


def subject(point, inputs, log, batch=4):
    rounds = {size: {s: FakeRound(log, s) for s in range(2)} for size in (batch, 1)}
    made = CompiledPoint(rounds, point, inputs[:8])
    made.build()
    return made


def test_images_that_do_not_exit_wait_for_a_full_batch_and_keep_their_tokens(numbered):
    log = []
    routed = subject(point(5.0), numbered, log)
    routed.run(1)
    assert log == [(0, [0, 1, 2, 3]), (0, [4, 5, 6, 7])]  # 5, 6 and 7 wait
    routed.run(1)
    assert log[2:] == [(0, [0, 1, 2, 3]), (0, [4, 5, 6, 7]), (1, [5, 6, 7, 5])]
    assert routed.shares() == [10 / 14, 4 / 14]


def test_a_round_alone_runs_alone(numbered):
    log = []
    subject(point(None, s=1), numbered, log).run(1)
    assert log == [(1, [0, 1, 2, 3]), (1, [4, 5, 6, 7])]


def test_one_image_stops_where_it_exits(numbered):
    log = []
    routed = subject(point(5.0), numbered, log)
    routed.one(3)
    routed.one(6)
    assert log == [(0, [3]), (0, [6]), (1, [6])]


class FakeNvml:
    NVMLError = RuntimeError

    def __init__(self, tells):
        self.tells, self.millijoules = tells, 0

    def nvmlInit(self):  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        assert uuid == "GPU-1234"
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802
        if not self.tells:
            raise RuntimeError("not supported")
        self.millijoules += 500
        return self.millijoules


@pytest.mark.parametrize("tells", [True, False])
def test_joules_are_those_of_the_gpu_in_use_or_none(monkeypatch, capsys, tells):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(tells))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runs = []
    joules = EnergyCounter().per_image(SimpleNamespace(run=runs.append, images=25), seconds=0.01)
    if tells:
        assert joules == pytest.approx(0.5 / 25 / sum(runs))
    else:
        assert joules is None
        assert "joules are not measured" in capsys.readouterr().out
