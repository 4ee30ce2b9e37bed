import gc
import itertools
import threading
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from progresvit.engine import Engine, MemoryWarning
from progresvit.engine.export.manifest import tokens_shape
from progresvit.engine.torch_backend import TorchBackend
from progresvit.routing import top10_entropy
from tests.engine.test_engine import all_rounds
from tests.factories import random_pixels, tiny_config, undecided_model
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def model():
    return undecided_model(tiny_config([16, 24, 32], [1, 1, 2], num_classes=12))


@pytest.fixture(scope="module")
def images():
    return random_pixels(90)


@pytest.fixture(scope="module")
def expected(model, images):
    """Of the plain model: logits (B, S, K) and entropies (B, S)."""
    logits = all_rounds(model, images)
    return logits, top10_entropy(logits.flatten(0, 1)).view(90, -1)


@pytest.fixture(scope="module")
def middling(expected):
    """Thresholds that let some images exit in each round."""
    return tuple(expected[1][:, s].double().quantile(0.4).item() for s in range(2))


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_thresholds_and_batches_give_the_plain_models_answers_in_order(model, images, expected, data):
    logits, entropy = expected
    levels = st.sampled_from([0.0, 0.1, 0.35, 0.5, 0.8, 0.97, None])
    thresholds = [
        float("inf") if level is None else entropy[:, s].double().quantile(level).item() * (level > 0)
        for s, level in enumerate(data.draw(st.tuples(levels, levels)))
    ]
    sizes = data.draw(st.lists(st.integers(0, 30), max_size=8))
    batch = data.draw(st.integers(1, 40))
    engine = Engine(model, thresholds, batch=batch)
    ends = np.cumsum(sizes).tolist()
    pieces = [images[end - size : end] for size, end in zip(sizes, ends)]
    found = list(engine.stream(pieces, deadline=data.draw(st.sampled_from([None, 0.0, 1.0]))))
    assert len(found) == min(sum(sizes), 90)
    exiting = torch.cat(
        [entropy[:, :2].double() < torch.tensor(thresholds, dtype=torch.double), torch.ones(90, 1) > 0], 1
    )
    rounds = exiting.int().argmax(dim=1)
    close = ((entropy[:, :2].double() - torch.tensor(thresholds)).abs() < 1e-5).any(dim=1)
    for row, one in enumerate(found):
        if not close[row]:
            assert one.exit_round == rounds[row] + 1
            answer = logits[row, rounds[row]].softmax(dim=-1)
            assert one.index == answer.argmax()
            assert one.probability == pytest.approx(answer.max().item(), abs=1e-4)


def test_arrays_tensors_and_streams_of_them_agree(model, images, middling):
    engine = Engine(model, middling, batch=16)
    whole = engine.classify(images)
    assert engine.classify(images.numpy()) == whole
    assert list(engine.stream(images.numpy()[first : first + 7] for first in range(0, 90, 7))) == whole
    assert {one.exit_round for one in whole} == {1, 2, 3}


def test_images_of_other_sides_may_follow_each_other(model, images, middling):
    engine = Engine(model, middling, batch=16)
    larger = torch.nn.functional.interpolate(images.float(), size=(40, 40)).to(torch.uint8)
    found = list(engine.stream([images[:20], larger[:20], images[20:30]]))
    apart = [Engine(model, middling).classify(some) for some in (images[:20], larger[:20], images[20:30])]
    assert [one.index for one in found] == [one.index for some in apart for one in some]


def test_no_image_waits_longer_than_the_deadline_even_if_the_loader_does(model, images):
    engine = Engine(model, 0.0, batch=64)
    go_on = threading.Event()

    def slow():
        yield images[:5]
        assert go_on.wait(PATIENCE), "the first results never came"
        yield images[5:10]

    stream = engine.stream(slow(), deadline=0.05)
    first = [next(stream) for _ in range(5)]
    go_on.set()
    found, expected = first + list(stream), engine.classify(images[:10])
    assert [(one.index, one.exit_round) for one in found] == [(one.index, one.exit_round) for one in expected]


def test_without_a_deadline_batches_fill_up(model, images, monkeypatch):
    counts = []
    run = TorchBackend.run
    monkeypatch.setattr(
        TorchBackend, "run", lambda self, s, buffer, first, n: (counts.append(n), run(self, s, buffer, first, n))[1]
    )
    list(Engine(model, 0.0, batch=30).stream(images.split(4), deadline=None))
    assert counts == [30] * 9


def test_what_the_loader_raises_comes_out_and_the_engine_is_free_again(model, images):
    engine = Engine(model, 1.0)

    def broken():
        yield images[:5]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(engine.stream(broken()))
    with pytest.raises(ValueError, match="uint8"):
        list(engine.stream([images.float()]))
    with pytest.raises(ValueError, match="ahead must be at least 1 batch, got 0"):
        list(engine.stream([images], ahead=0))
    assert len(engine.classify(images)) == 90


def test_an_engine_serves_several_streams_and_calls_at_a_time(model, images, middling):
    engine = Engine(model, middling, batch=16)
    expected = [(one.index, one.exit_round) for one in engine.classify(images)]
    first, second = (engine.stream(images.split(size), deadline=None) for size in (10, 7))
    found = [], []
    for _ in range(90):  # both in this thread, which drives them by turns
        found[0].append(next(first))
        found[1].append(next(second))
    assert [(one.index, one.exit_round) for one in engine.classify(images)] == expected
    for answers in found:
        assert [(one.index, one.exit_round) for one in answers] == expected
    assert next(first, None) is next(second, None) is None


def test_predictions_come_as_they_finish_and_a_stream_puts_them_in_order(model, images, middling):
    engine = Engine(model, middling, batch=16)
    found = list(engine.as_completed(images.split(11), deadline=None))
    assert sorted(number for number, _ in found) == list(range(90))
    assert [number for number, _ in found] != list(range(90))
    assert [one for _, one in sorted(found, key=lambda pair: pair[0])] == list(
        engine.stream(images.split(11), deadline=None)
    )


def test_predictions_held_back_are_bounded(model, images, monkeypatch):
    monkeypatch.setattr("progresvit.engine.worker.HELD_BATCHES", 2)
    entropy = top10_entropy(all_rounds(model, images)[:, 0]).double()
    order = entropy.argsort()
    slow, quick = images[order[-1:]], images[order[:4]]
    engine = Engine(model, (entropy.median().item(), 0.0), batch=4)
    taken = []

    def batches():
        yield slow
        for number in range(100):
            taken.append(number)
            yield quick

    stream = engine.stream(batches(), deadline=None, ahead=1)
    assert next(stream).exit_round > 1  # it waited in vain for other images that continue
    assert len(taken) < 2 + 2 + 1 + 3  # two batches held back, and those that are read ahead


def test_a_stream_that_is_closed_early_cancels_its_images_and_frees_the_engine(model, images):
    engine = Engine(model, 0.0, batch=64)
    engine.classify(images[:1])  # starts the thread of the engine
    before = set(threading.enumerate())
    stream = engine.as_completed(itertools.repeat(images[:10]), deadline=0.0)
    next(stream)
    assert set(threading.enumerate()) - before
    stream.close()
    assert not set(threading.enumerate()) - before  # the thread that reads ahead has stopped
    assert engine.counts.pending == 0
    engine.classify(images[:1])  # after the cancellation
    before = engine.counts.images[0]
    assert len(engine.classify(images[:7])) == 7
    assert engine.counts.images[0] == before + 7  # nothing is left in the buffers


@pytest.mark.slow
def test_two_hundred_batches_leave_no_tensors_behind(model, images):
    engine = Engine(model, 1.0, batch=16)

    def held():
        gc.collect()
        return sum(one.nbytes for one in gc.get_objects() if type(one) is torch.Tensor and one.layout is torch.strided)

    list(engine.stream(images.split(11)))
    before = held()
    assert sum(1 for _ in engine.stream(images[: 1 + number % 17] for number in range(200))) > 1000
    assert held() <= before + 2**16


def test_out_of_memory_halves_the_batch_remembers_it_and_says_so_once(model, images, middling, monkeypatch):
    whole = Engine(model, middling).classify(images)
    run = TorchBackend.run

    def narrow(self, s, buffer, first, count):
        if count > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(self, s, buffer, first, count)

    monkeypatch.setattr(TorchBackend, "run", narrow)
    engine = Engine(model, middling, batch=64)
    with pytest.warns(MemoryWarning, match="continues with smaller batches") as caught:
        found = engine.classify(images)
    assert len(caught) == 1
    assert engine.batch == 8
    assert [one.index for one in found] == [one.index for one in whole]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [one.index for one in engine.classify(images)] == [one.index for one in whole]


class LittleMemory:
    """Rounds of a backend of one's own; the first channel's first byte is the round after which an image is sure."""

    def __init__(self, config, most):
        self.config, self.most = config, dict(most)

    def run(self, s, pixels, tokens):
        if len(pixels) > self.most.get(s, len(pixels)):
            raise MemoryError
        logits = np.zeros((len(pixels), self.config.num_classes), np.float32)
        logits[pixels[:, 0, 0, 0] <= s, 0] = 50
        is_last = s == len(self.config.rounds) - 1
        return logits, None if is_last else np.zeros((len(pixels), *tokens_shape(self.config, s)), np.float32)


def sure_after(*rounds):
    """A batch of 8 images, the first ones sure after these rounds and the others after the first: (8, 3, 32, 32)."""
    pixels = np.zeros((8, 3, 32, 32), np.uint8)
    pixels[: len(rounds), 0, 0, 0] = rounds
    return pixels


def answers_in_a_thread(stream):
    """The number of answers; the stream may not end."""
    answered = []
    thread = threading.Thread(target=lambda: answered.extend(stream), daemon=True)
    thread.start()
    thread.join(60)
    return "the stream hangs" if thread.is_alive() else len(answered)


def test_a_stream_goes_on_after_batches_have_become_smaller(model):
    """Round 2 has 8 images after 24 batches. More images are in progress then than 32 of the smaller batches hold."""
    rounds = LittleMemory(model.config, {1: 4})
    engine = Engine(model, 0.5, backend=lambda _: rounds, batch=8)
    batches = (sure_after(*(() if number % 3 else (1,) if number else (2,))) for number in range(60))
    with pytest.warns(MemoryWarning):
        assert answers_in_a_thread(engine.stream(batches, deadline=None)) == 480
    assert engine.batch == 4


@pytest.mark.filterwarnings("ignore::progresvit.engine.MemoryWarning")
def test_a_stream_goes_on_after_another_caller_ran_out_of_memory(model):
    rounds, shrunk = LittleMemory(model.config, {}), threading.Event()
    engine = Engine(model, 0.5, backend=lambda _: rounds, batch=8)

    def batches():
        yield sure_after(1)
        for _ in range(20):
            yield sure_after()
        while engine.counts.images[0] < 168:  # all of them wait behind the first image
            shrunk.wait(0.01)
        rounds.most = {0: 4}
        engine.classify(sure_after())
        shrunk.set()
        for _ in range(20):
            yield sure_after()

    assert answers_in_a_thread(engine.stream(batches(), deadline=None)) == 41 * 8
    assert shrunk.is_set()


def test_warming_up_changes_no_answer(model, images):
    engine = Engine(model, 1.0)
    engine.warm_up()
    assert engine.classify(images) == Engine(model, 1.0).classify(images)
