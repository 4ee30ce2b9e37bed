"""Several callers of one engine: threads, futures and event loops share its batches."""

import asyncio
import gc
import signal
import sys
import threading
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait

import pytest
import torch
from PIL import Image

from progresvit.engine import Engine
from progresvit.engine.scheduler import EngineFull
from progresvit.engine.torch_backend import TorchBackend
from progresvit.routing import top10_entropy
from tests.engine.test_engine import all_rounds
from tests.factories import random_pixels, tiny_config, undecided_model
from tests.waiting import PATIENCE, wait_until

LONG = PATIENCE
"""Seconds after which a test that hangs fails."""


@pytest.fixture(scope="module")
def model():
    return undecided_model(tiny_config(num_classes=12))


@pytest.fixture(scope="module")
def images():
    return random_pixels(128)


@pytest.fixture(scope="module")
def entropy(model, images):
    return top10_entropy(all_rounds(model, images)[:, 0]).double()


@pytest.fixture(scope="module")
def threshold(entropy):
    """Half of the images continue, and none is near it."""
    ordered = entropy.sort().values
    gaps = ordered[40:88].diff()
    place = 40 + int(gaps.argmax())
    return ((ordered[place] + ordered[place + 1]) / 2).item()


@pytest.fixture(scope="module")
def expected(model, images, entropy, threshold):
    """Of the plain model: class and round of each image."""
    logits = all_rounds(model, images)
    rounds = (entropy >= threshold).long()
    answers = logits[torch.arange(len(images)), rounds].argmax(dim=-1)
    return list(zip(answers.tolist(), (rounds + 1).tolist()))


@pytest.fixture(scope="module")
def quick(images, entropy, threshold):
    """Images that exit after the first round."""
    return images[entropy < threshold]


@pytest.fixture(scope="module")
def slow(images, entropy, threshold):
    """Images that continue."""
    return images[entropy >= threshold]


@pytest.fixture
def make_engine(model, threshold):
    made = []

    def make(threshold=threshold, **options):
        made.append(Engine(model, threshold, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


class Gate:
    """Stops the rounds: each run waits until it is let through, and is counted."""

    def __init__(self, monkeypatch, s=None):
        self.s, self.sizes, self.is_open = s, [], threading.Event()
        self.reached = threading.Semaphore(0)
        run = TorchBackend.run

        def gated(backend, s, buffer, first, count):
            self.sizes.append((s, count))
            if self.s in (None, s) and not self.is_open.is_set():
                self.reached.release()
                assert self.is_open.wait(LONG)
            return run(backend, s, buffer, first, count)

        monkeypatch.setattr(TorchBackend, "run", gated)

    def wait(self):
        """Until a round has reached the gate."""
        assert self.reached.acquire(timeout=LONG)

    def ran(self, s):
        return [count for round_, count in self.sizes if round_ == s]


def facts(predictions):
    return [(one.index, one.exit_round) for one in predictions]


@pytest.mark.parametrize("batch", [1, 16, 64])
def test_many_threads_get_their_own_answers(make_engine, images, expected, batch):
    engine = make_engine(batch=batch)
    start = threading.Barrier(64)

    def call(number):
        start.wait(LONG)
        for turn in range(4):
            first, count = (37 * number + 11 * turn) % 100, 1 + (number + turn) % 28
            some, answers = images[first : first + count], expected[first : first + count]
            if number % 4 == 0:
                assert facts(engine.classify(some)) == answers
            elif number % 4 == 1:
                assert facts(engine.submit(some).result(LONG)) == answers
            elif number % 4 == 2:
                assert facts(engine.stream(some.split(5), deadline=(None, 0.0)[turn % 2])) == answers
            else:
                found = sorted(engine.as_completed(some.split(3)), key=lambda pair: pair[0])
                assert [place for place, _ in found] == list(range(len(some)))
                assert facts(one for _, one in found) == answers

    with ThreadPoolExecutor(64) as pool:
        for done in [pool.submit(call, number) for number in range(64)]:
            done.result(LONG)
    counts = engine.counts
    assert (counts.pending, counts.cancelled) == (0, 0)
    worker = engine._scheduler.worker
    assert worker._fed == worker._firsts == []
    assert not worker._queue
    assert worker._batcher.is_empty


def test_callers_share_batches_in_every_round(make_engine, slow, monkeypatch):
    gate = Gate(monkeypatch)
    engine = make_engine(batch=8)
    first = engine.submit(slow[:1])
    gate.wait()
    futures = [engine.submit(slow[number : number + 2]) for number in range(1, 9, 2)]  # meanwhile
    gate.is_open.set()
    assert all(len(future.result(LONG)) == 2 for future in futures)
    assert len(first.result(LONG)) == 1
    assert gate.sizes == [(0, 1), (0, 8), (1, 8), (1, 1)]
    assert engine.counts.images == (9, 9)
    assert engine.counts.batches == (2, 2)


@pytest.fixture
def threads(monkeypatch):
    """Names of the threads that run each round, in their order."""
    run, names = TorchBackend.run, []

    def watched(backend, s, buffer, first, count):
        names.append((s, threading.current_thread().name))
        return run(backend, s, buffer, first, count)

    monkeypatch.setattr(TorchBackend, "run", watched)
    return names


def test_a_caller_of_an_idle_engine_computes_its_images_itself(make_engine, slow, threads):
    engine = make_engine(batch=64)
    for _ in range(3):
        engine.classify(slow[:3])
    assert threads == [(0, "MainThread"), (1, "MainThread")] * 3


def test_the_thread_of_the_engine_computes_futures_and_streams(make_engine, slow, threads):
    engine = make_engine(batch=64)
    engine.submit(slow[:3]).result(LONG)
    list(engine.stream([slow[:3]]))
    assert {name for _, name in threads} == {"progresvit-engine"}


def test_the_thread_of_the_engine_goes_on_with_the_images_of_a_caller_when_others_call(
    make_engine, slow, threads, monkeypatch
):
    gate = Gate(monkeypatch)
    engine = make_engine(batch=8)
    with ThreadPoolExecutor(1, "caller") as pool:
        alone = pool.submit(engine.classify, slow[:3])
        gate.wait()
        other = engine.submit(slow[3:6])  # while the caller computes its first round
        wait_until(lambda: engine._scheduler.worker._wants_turn)
        gate.is_open.set()
        assert [one.exit_round for one in alone.result(LONG) + other.result(LONG)] == [2] * 6
    assert threads == [(0, "caller_0"), *[(s, "progresvit-engine") for s, _ in gate.sizes[1:]]]
    assert gate.sizes[0] == (0, 3)
    assert engine.counts.pending == 0


def test_exits_resolve_before_the_images_that_continue(make_engine, quick, slow, monkeypatch):
    gate = Gate(monkeypatch, s=1)
    engine = make_engine(batch=64)
    early = engine.submit(quick[1:4])
    both = engine.submit(torch.cat([quick[:1], slow[:1]]))
    gate.wait()
    assert [one.exit_round for one in early.result(LONG)] == [1] * 3
    assert not both.done()
    gate.is_open.set()
    assert [one.exit_round for one in both.result(LONG)] == [1, 2]


def test_cancelled_images_never_reach_the_second_round(make_engine, slow, monkeypatch):
    gate = Gate(monkeypatch)
    engine = make_engine(batch=8)
    running, other = engine.submit(slow[:3]), engine.submit(slow[3:4])
    gate.wait()
    waiting = engine.submit(slow[4:9])
    assert running.cancel()  # while its first round runs
    assert waiting.cancel()  # before it has begun
    gate.is_open.set()
    assert len(other.result(LONG)) == 1
    engine.close()
    assert gate.ran(1) == [1]
    assert sum(gate.ran(0)) <= 4
    assert engine.counts.cancelled == 8
    assert engine.counts.pending == 0
    assert wait([running, waiting], LONG).not_done == set()
    with pytest.raises(CancelledError):
        running.result()


def test_images_that_wait_for_the_second_round_are_removed_when_their_caller_leaves(make_engine, slow, monkeypatch):
    engine = make_engine(batch=8)
    move = TorchBackend.move
    moved = []

    def cancel_then(backend, *args):
        move(backend, *args)
        moved.append(future.cancel())  # they are in the buffer of round 2 now

    monkeypatch.setattr(TorchBackend, "move", cancel_then)
    gate = Gate(monkeypatch, s=0)
    blocker = engine.submit(slow[:1])
    gate.wait()
    future, other = engine.submit(slow[1:4]), engine.submit(slow[4:6])
    gate.is_open.set()
    assert [one.exit_round for one in other.result(LONG)] == [2, 2]
    blocker.result(LONG)
    engine.close()
    assert any(moved)
    assert engine.counts.cancelled == 3
    assert sum(gate.ran(1)) == 3  # the blocker and the other
    assert future.cancelled()


def test_a_caller_that_leaves_an_event_loop_takes_its_images_along(make_engine, images, expected, slow, monkeypatch):
    engine = make_engine(batch=64)

    async def several():
        return await asyncio.gather(*(engine.aclassify(images[place : place + 2]) for place in range(0, 20, 2)))

    assert [facts(found) for found in asyncio.run(several())] == [
        expected[place : place + 2] for place in range(0, 20, 2)
    ]
    gate, before = Gate(monkeypatch, s=0), engine.counts.images[1]

    async def leave():
        async with asyncio.timeout(None) as limit:
            task = asyncio.ensure_future(engine.aclassify(slow[:5]))
            await asyncio.to_thread(gate.wait)
            limit.reschedule(0)
            await task

    with pytest.raises(TimeoutError):
        asyncio.run(leave())
    gate.is_open.set()
    engine.close()
    assert engine.counts.images[1] == before
    assert engine.counts.cancelled == 5


def test_what_waits_is_bounded(make_engine, images, expected, monkeypatch):
    gate = Gate(monkeypatch, s=0)
    engine = make_engine(batch=4, pending=6)
    first = engine.submit(images[:4])
    gate.wait()
    second = engine.submit(images[4:6])
    assert engine.counts.pending == 6
    with pytest.raises(EngineFull, match=r"6 images wait or run, and the engine takes 6: .* larger pending"):
        engine.submit(images[6:7], block=False)
    with pytest.raises(EngineFull):
        engine.submit(images[6:7], timeout=0.01)
    with pytest.raises(EngineFull):
        asyncio.run(engine.aclassify(images[6:7]))
    has_begun = threading.Event()

    def patient():
        has_begun.set()
        return engine.submit(images[6:9]), engine.classify(images[9:11])

    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(patient)
        assert has_begun.wait(LONG)
        assert not later.done()
        gate.is_open.set()
        third, fourth = later.result(LONG)
    found = first.result(LONG) + second.result(LONG) + third.result(LONG) + fourth
    assert facts(found) == expected[:11]
    assert facts(engine.classify(images[:40])) == expected[:40]  # more than that at once
    assert facts(engine.submit(images[:40]).result(LONG)) == expected[:40]


def test_an_error_reaches_all_callers_in_the_batch_and_no_other(make_engine, images, expected, monkeypatch):
    engine = make_engine(batch=4)
    run = TorchBackend.run
    state = {"error": RuntimeError("the device fell off")}
    gate = threading.Event()

    def broken(backend, s, buffer, first, count):
        assert gate.wait(LONG)
        error = state.pop("error", None)
        if error is not None:
            raise error
        return run(backend, s, buffer, first, count)

    monkeypatch.setattr(TorchBackend, "run", broken)
    engine._scheduler.worker.post(lambda: gate.wait(LONG))  # so that they share a batch
    affected = [engine.submit(images[:2]), engine.submit(images[2:4])]
    later = engine.submit(images[4:9])
    gate.set()
    for future in affected:
        with pytest.raises(RuntimeError, match="the device fell off"):
            future.result(LONG)
    assert facts(later.result(LONG)) == expected[4:9]
    for error in (RuntimeError("again"), MemoryError("once more")):
        state["error"] = error
        with pytest.raises(type(error), match=str(error)):
            engine.classify(images[:3])
        state["error"] = error
        with pytest.raises(type(error), match=str(error)):
            list(engine.stream([images[:3]]))
        assert facts(engine.classify(images[:3])) == expected[:3]
    assert engine.counts.pending == 0


def test_an_interrupt_of_a_caller_that_waits_cancels_its_images_and_loses_no_other_call(
    make_engine, images, slow, expected, monkeypatch
):
    engine = make_engine(batch=4)
    run, is_interrupted, interrupts = TorchBackend.run, threading.Event(), []

    def interrupt_once(*_):
        interrupts.append(True)
        if len(interrupts) == 1:
            raise KeyboardInterrupt

    def interrupting(backend, s, buffer, first, count):
        main = threading.main_thread().ident
        while not is_interrupted.wait(0.01):  # a thread that begins to wait at this moment does not notice the signal
            if sys._current_frames()[main].f_code.co_name == "results":
                signal.pthread_kill(main, signal.SIGUSR1)
        return run(backend, s, buffer, first, count)

    monkeypatch.setattr(TorchBackend, "run", interrupting)
    other = engine.submit(images[3:7])
    before = signal.signal(signal.SIGUSR1, interrupt_once)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.classify(slow[:3])
        is_interrupted.set()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert facts(other.result(LONG)) == expected[3:7]
    assert facts(engine.classify(images[:3])) == expected[:3]
    assert engine.counts.pending == 0
    assert engine.counts.cancelled == 3


def test_an_interrupt_of_a_caller_that_computes_loses_no_other_call(make_engine, images, expected, monkeypatch):
    engine = make_engine(batch=4)
    run, others = TorchBackend.run, []

    def interrupting(backend, s, buffer, first, count):
        if not others:
            others.append(engine.submit(images[3:9]))
            raise KeyboardInterrupt
        return run(backend, s, buffer, first, count)

    monkeypatch.setattr(TorchBackend, "run", interrupting)
    with pytest.raises(KeyboardInterrupt):
        engine.classify(images[:3])
    assert facts(others[0].result(LONG)) == expected[3:9]
    assert facts(engine.classify(images[:3])) == expected[:3]
    assert engine.counts.pending == 0


def test_a_bad_image_or_array_concerns_its_caller_only(make_engine, images, expected, tmp_path):
    engine = make_engine()
    photo = tmp_path / "photo.png"
    Image.new("RGB", (40, 40), "red").save(photo)
    (tmp_path / "torn.png").write_bytes(photo.read_bytes()[:40])
    found = engine.submit([photo, tmp_path / "torn.png", tmp_path / "none.png"] * 20).result(LONG)
    assert [one.error is None for one in found] == [True, False, False] * 20
    assert found[0].index == engine.classify([photo])[0].index
    assert all(one.error for one in engine.submit([tmp_path / "none.png"]).result(LONG))
    with pytest.raises(ValueError, match="uint8"):
        engine.submit(images.float())
    with pytest.raises(ValueError, match=r"submit\(\[image\]\)"):
        engine.submit(photo)
    with pytest.raises(ValueError, match="not int"):
        engine.submit([3]).result(LONG)
    assert engine.submit([]).result(LONG) == []
    assert facts(engine.submit(image for image in [photo]).result(LONG)) == facts(found[:1])
    assert engine.counts.pending == 0
    assert facts(engine.classify(images[:5])) == expected[:5]


def test_streams_with_images_of_different_sides_share_an_engine(make_engine, images):
    engine = make_engine(batch=8)
    larger = torch.nn.functional.interpolate(images.float(), size=(40, 40)).to(torch.uint8)
    expected = [facts(make_engine().classify(some)) for some in (images[:60], larger[:60])]

    def read(some):
        return facts(engine.stream(some[:60].split(7)))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(read, (images, larger))) == expected


def test_callbacks_may_submit_and_classify_is_refused_there(make_engine, images, expected):
    engine = make_engine()
    chained, refused = [], []
    gate, done = threading.Event(), threading.Event()

    def then(_):
        assert gate.wait(LONG)
        chained.append(engine.submit(images[3:6]))
        try:
            engine.classify(images[:1])
        except RuntimeError as error:
            refused.append(str(error))
        done.set()

    future = engine.submit(images[:3])
    future.add_done_callback(then)
    gate.set()
    assert done.wait(LONG)
    assert facts(chained[0].result(LONG)) == expected[3:6]
    assert all("use submit there" in text for text in refused)


def test_a_closed_engine_has_finished_its_futures_and_refuses_calls(model, images, expected, threshold):
    before = set(threading.enumerate())
    with Engine(model, threshold, batch=4) as engine:
        futures = [engine.submit(images[place : place + 3]) for place in range(0, 30, 3)]
    assert all(future.done() for future in futures)
    assert [fact for future in futures for fact in facts(future.result())] == expected[:30]
    assert set(threading.enumerate()) == before
    for call in (engine.classify, engine.submit, lambda some: next(engine.stream([some]))):
        with pytest.raises(RuntimeError, match="the engine is closed"):
            call(images[:2])
    engine.close()


def test_an_engine_that_is_not_used_any_more_is_freed_with_its_threads(model, images, expected, threshold):
    before = set(threading.enumerate())
    engine = Engine(model, threshold)
    assert facts(engine.classify(images[:3])) == expected[:3]
    assert facts(engine.submit(images[:3]).result(LONG)) == expected[:3]
    kept = engine.submit(images[:9])
    rounds = weakref.ref(engine.rounds)
    del engine
    assert facts(kept.result(LONG)) == expected[:9]  # futures of an engine that is gone are resolved
    for thread in set(threading.enumerate()) - before:
        thread.join(LONG)
        assert not thread.is_alive()
    gc.collect()
    assert rounds() is None


def test_an_engine_without_futures_is_freed_as_soon_as_its_thread_has_ended(model, images, threshold):
    before = set(threading.enumerate())
    engine = Engine(model, threshold)
    engine.classify(images[:3])
    list(engine.stream([images[:3]]))
    gc.collect()
    gc.disable()
    try:
        rounds = weakref.ref(engine.rounds)
        (thread,) = set(threading.enumerate()) - before
        del engine
        thread.join(LONG)
        del thread
        assert rounds() is None  # without garbage collection
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_thousand_calls_leave_nothing_behind(make_engine, images):
    engine = make_engine(batch=16)

    def held():
        gc.collect()
        return sum(one.nbytes for one in gc.get_objects() if type(one) is torch.Tensor and one.layout is torch.strided)

    def calls(count):
        futures = [engine.submit(images[number % 90 :][: 1 + number % 7]) for number in range(count)]
        for future in futures[::3]:
            future.cancel()
        for future in futures:
            if not future.cancelled():
                future.result(LONG)
        for number in range(count // 10):
            next(engine.as_completed(images[: 1 + number % 17].split(4)))
            engine.classify(images[:3])

    calls(100)
    before = held()
    calls(1000)
    assert held() <= before + 2**16
    assert engine.counts.pending == 0
    assert engine._scheduler.worker._fed == []
    assert not engine._scheduler.worker.streams
    assert not engine._scheduler.worker._queue


def between(entropy):
    """A threshold between the two entropies in the middle: batches of other sizes round them differently."""
    return entropy.sort().values[len(entropy) // 2 - 1 :][:2].double().mean().item()


def test_calls_with_thresholds_of_their_own_share_batches(make_engine, model, images, expected, entropy):
    engine = make_engine()
    logits = all_rounds(model, images)
    limits = [None, 0.0, float("inf"), between(entropy)]
    futures = [engine.submit(images, threshold=limit) for limit in limits]
    plain, every, first, own = ([(one.index, one.exit_round) for one in future.result(LONG)] for future in futures)
    assert plain == expected
    assert every == [(index, 2) for index in logits[:, 1].argmax(dim=-1).tolist()]
    assert first == [(index, 1) for index in logits[:, 0].argmax(dim=-1).tolist()]
    rounds = (entropy >= limits[-1]).long()
    answers = logits[torch.arange(len(images)), rounds].argmax(dim=-1)
    assert own == list(zip(answers.tolist(), (rounds + 1).tolist()))
    assert [(one.index, one.exit_round) for one in engine.classify(images)] == expected


def test_a_threshold_of_its_own_keeps_the_rules_for_withheld_answers(model, images, entropy):
    limit = between(entropy)
    with Engine(model, 0.0, abstain=limit, device="cpu") as engine:
        found = engine.submit(images, threshold=float("inf")).result(LONG)
    assert [one.abstained for one in found] == (entropy >= limit).tolist()
    with Engine(model, float("inf"), abstain=limit, device="cpu") as engine:
        assert [one.abstained for one in engine.submit(images).result(LONG)] == (entropy >= limit).tolist()


def test_a_wrong_threshold_of_a_call_is_refused(make_engine, images):
    with pytest.raises(ValueError, match=r"0 \(every round runs\) or more, not -1"):
        make_engine().submit(images, threshold=-1.0)
    with pytest.raises(ValueError, match="not nan"):
        make_engine().submit(images, threshold=float("nan"))


class Noted:
    """An observer."""

    def __init__(self):
        self.batches, self.times, self.waited = [], [], []

    def started(self, s, waited):
        self.batches.append((s, len(waited)))
        self.waited += waited.tolist()

    def finished(self, s, seconds, entropy):
        self.times.append((s, len(entropy), seconds))

    def shrunk(self):
        raise AssertionError("there is enough memory")


def test_an_observer_gets_a_report_of_each_batch(make_engine, images):
    engine, noted = make_engine(batch=32), Noted()
    engine.classify(images[:1])
    before = engine.counts
    engine.observe(noted)
    engine.submit(images).result(LONG)
    engine.classify(images)
    after = engine.counts
    for s in range(2):
        assert sum(size for s_, size in noted.batches if s_ == s) == after.images[s] - before.images[s]
    assert sorted((s, size) for s, size, _ in noted.times) == sorted(noted.batches)
    assert all(seconds > 0 for _, _, seconds in noted.times)
    assert all(seconds >= 0 for seconds in noted.waited)


def test_calls_may_wait_for_a_fuller_batch(make_engine, images, expected):
    engine, noted = make_engine(batch=8), Noted()
    engine.observe(noted)
    futures = [engine.submit(images[number : number + 1], wait=2.0) for number in range(8)]
    found = [future.result(LONG)[0] for future in futures]
    assert [(one.index, one.exit_round) for one in found] == expected[:8]
    assert (0, 8) in noted.batches
    (late,) = engine.submit(images[:1], wait=0.05).result(LONG)
    assert (late.index, late.exit_round) == expected[0]
