"""The batcher with rounds that compute nothing: the bytes of each image give the round after which it exits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from progresvit.engine.batcher import OVERTAKEN, Batcher, Totals
from progresvit.engine.buffers import RoundBuffer, batch_size, padded_size, power_sizes
from progresvit.engine.prediction import Prediction
from progresvit.routing.decide import Answers


class OutOfPaperError(Exception):
    pass


class FinishedRound:
    def __init__(self, answers, tokens):
        self.found, self.tokens = answers, tokens

    def finished(self):
        return True

    def answers(self):
        return self.found


class LateRound(FinishedRound):
    """Finished as soon as someone waits for it."""

    is_late = True

    def finished(self):
        return not self.is_late

    def answers(self):
        self.is_late = False
        return self.found


class PaperRounds:
    """Tokens carry the image's number and the rounds it has run; broken bookkeeping shows in the answers."""

    out_of_memory = (OutOfPaperError,)

    def __init__(self, rounds, sizes=None, memory=10**9, copies=1):
        self.last, self.sizes, self.memory, self.copies = rounds - 1, sizes, memory, copies
        self.batches = [[] for _ in range(rounds)]
        self.shrinks = 0
        self.tokens = {}

    def make_buffers(self, s, capacity, side):
        def tokens():
            return np.zeros((capacity, 2), np.int64)

        return [RoundBuffer(tokens(), tokens() if s else None) for _ in range(self.copies)]

    def load(self, buffer, pixels):
        buffer.pixels[buffer.fill : buffer.fill + len(pixels)] = pixels

    def run(self, s, buffer, first, count):
        if count > self.memory:
            raise OutOfPaperError
        self.batches[s].append(count)
        pixels = buffer.pixels[first : first + count].copy()
        if s:
            tokens = buffer.tokens[first : first + count]
            assert (tokens[:, 0] == pixels[:, 0]).all()
            assert (tokens[:, 1] == s - 1).all()
        exiting = (pixels[:, 1] <= s) | (s == self.last)
        zeros = np.zeros(count, np.float32)
        none = np.zeros(count, bool)
        answers = Answers(exiting, pixels[:, :1], zeros[:, None], zeros, none, none, zeros)
        tokens = self.tokens.setdefault(buffer, np.zeros((buffer.capacity, 2), np.int64))[:count]  # as in a CUDA graph
        tokens[:] = np.stack([pixels[:, 0], np.full(count, s)], axis=1)
        return FinishedRound(answers, tokens) if self.copies == 1 else LateRound(answers, tokens)

    def move(self, source, first, running, rows, target):
        places = slice(target.fill, target.fill + len(rows))
        target.pixels[places], target.tokens[places] = source.pixels[first + rows], running.tokens[rows]

    def keep(self, buffer, rows):
        buffer.pixels[: len(rows)] = buffer.pixels[rows]
        if buffer.tokens is not None:
            buffer.tokens[: len(rows)] = buffer.tokens[rows]

    def shrink(self):
        self.shrinks += 1


def results(s, answers, rows):
    rest = {"label": None, "probability": 0.0, "entropy": 0.0, "gmacs": 0.0, "abstained": False}
    return [Prediction(index=int(answers.index[row]), exit_round=s + 1, **rest) for row in rows]


class Collected(dict):
    """Predictions by number. Those of one delivery are in order, and no image gets two."""

    def add(self, numbers, predictions):
        assert (np.diff(numbers) > 0).all()
        for number, prediction in zip(numbers.tolist(), predictions, strict=True):
            assert number not in self
            self[number] = prediction


def keep_decisions(s, answers, thresholds):
    assert np.isnan(thresholds).all()
    return answers


def make_batcher(rounds, capacity, paper=None, **options):
    paper = paper or PaperRounds(rounds, **options)
    buffers = [paper.make_buffers(s, capacity, 0) for s in range(rounds)]
    found, shrunk, totals = Collected(), [], Totals([0] * rounds, [0] * rounds)
    batcher = Batcher(
        paper,
        buffers,
        largest=capacity,
        apply_thresholds=keep_decisions,
        make_predictions=results,
        deliver=found.add,
        shrunk=shrunk.append,
        before_round=lambda: None,
        totals=totals,
    )
    return batcher, paper, found, shrunk


def feed(batcher, exits, first=0, due=np.inf):
    batcher.feed(images(exits, first), np.arange(first, first + len(exits)), due)


def advance(batcher, now=0.0):
    while batcher.advance(now):
        pass


def images(exits, first=0):
    return np.array([[first + number, exit_] for number, exit_ in enumerate(exits)], np.int64).reshape(-1, 2)


PATTERNS = st.integers(1, 4).flatmap(
    lambda rounds: st.tuples(st.just(rounds), st.lists(st.lists(st.integers(0, rounds - 1), max_size=20), max_size=8))
)


@settings(max_examples=200, deadline=None)
@given(
    PATTERNS,
    st.integers(1, 9),
    st.booleans(),
    st.lists(st.sampled_from(["continue", "flush", "advance", "deliver", "overtaken"])),
    st.integers(1, 9),
    st.integers(1, 3),
)
def test_any_pattern_of_exits_comes_out_right(pattern, capacity, has_sizes, actions, memory, copies):
    rounds, batches = pattern
    sizes = power_sizes(capacity) if has_sizes else None
    batcher, paper, found, _ = make_batcher(rounds, capacity, sizes=sizes, memory=memory, copies=copies)
    exits = [exit_ for batch in batches for exit_ in batch]
    for number, batch in enumerate(batches):
        feed(batcher, batch, first=sum(map(len, batches[:number])), due=float(number % 2))
        act(batcher, actions[number % len(actions)] if actions else "continue")
        assert all(buffer.fill <= buffer.capacity for buffers in batcher.buffers for buffer in buffers)
    batcher.flush()
    assert batcher.is_empty
    assert sorted(found) == list(range(len(exits)))
    assert [found[number].index for number in range(len(exits))] == list(range(len(exits)))
    assert [found[number].exit_round - 1 for number in range(len(exits))] == exits
    assert [sum(run) for run in paper.batches] == [sum(exit_ >= s for exit_ in exits) for s in range(rounds)]
    assert batcher.totals == Totals([sum(run) for run in paper.batches], [len(run) for run in paper.batches])
    assert max((max(run, default=0) for run in paper.batches), default=0) <= min(capacity, memory)


def act(batcher, action):
    if action == "flush":
        batcher.flush()
    elif action == "advance":
        advance(batcher)
    elif action == "deliver":
        batcher.keep_up(-np.inf)
    elif action == "overtaken":
        batcher.keep_up(0.0)


class WatchedRounds(PaperRounds):
    """Notes which images each round runs, and cancels images from within, as another thread would."""

    def __init__(self, rounds, cancels, **options):
        super().__init__(rounds, **options)
        self.ran, self.cancels, self.batcher, self.cancelled = [set() for _ in range(rounds)], cancels, None, set()

    def cancel_next(self):
        first, end = self.cancels.pop(0)
        self.batcher.cancel(first, end)
        self.cancelled |= set(range(first, end))

    def run(self, s, buffer, first, count):
        numbers = set(buffer.numbers[first : first + count].tolist())
        assert not numbers & self.cancelled, "a cancelled image starts a round"
        self.ran[s] |= numbers
        running = super().run(s, buffer, first, count)
        if self.cancels:
            self.cancel_next()
        return running


@settings(max_examples=300, deadline=None)
@given(
    PATTERNS,
    st.integers(1, 9),
    st.booleans(),
    st.integers(1, 2),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12))),
    st.data(),
)
def test_cancelled_images_start_no_further_round_and_harm_no_other(pattern, capacity, has_sizes, copies, cancels, data):
    rounds, batches = pattern
    exits = [exit_ for batch in batches for exit_ in batch]
    cancels = [(first, min(first + count, len(exits))) for first, count in cancels if first < len(exits)]
    paper = WatchedRounds(rounds, cancels, sizes=power_sizes(capacity) if has_sizes else None, copies=copies)
    batcher, _, found, _ = make_batcher(rounds, capacity, paper)
    paper.batcher = batcher
    entered = 0
    for batch in batches:
        feed(batcher, batch, first=entered, due=0.0)
        entered += len(batch)
        while paper.cancels and paper.cancels[0][1] <= entered and data.draw(st.booleans()):
            paper.cancel_next()
        act(batcher, data.draw(st.sampled_from(["continue", "flush", "advance", "deliver"])))
    batcher.flush()
    assert batcher.is_empty
    for number, exit_ in enumerate(exits):
        if number not in paper.cancelled:
            assert found[number].index == number
            assert found[number].exit_round - 1 == exit_
            assert all((number in ran) == (s <= exit_) for s, ran in enumerate(paper.ran))
    if not paper.cancels:
        feed(batcher, [rounds - 1], first=entered)
        batcher.flush()
        assert batcher._cancelled == []  # nothing is kept of those that have left


def test_cancelled_images_are_removed_from_the_buffers_in_which_they_wait():
    batcher, paper, found, _ = make_batcher(2, 4)
    feed(batcher, [1, 1, 0, 0])  # a full batch
    batcher.keep_up(-np.inf)
    assert (batcher.buffers[1][0].numbers == [0, 1]).all()
    batcher.cancel(0, 1)
    feed(batcher, [1, 1, 1, 1], first=4)  # it has run when these are cancelled
    batcher.cancel(5, 7)
    batcher.flush()
    assert (sum(paper.batches[0]), sum(paper.batches[1])) == (8, 3)
    assert sorted(found) == [1, 2, 3, 4, 7]


def test_with_two_buffers_a_round_starts_again_before_its_answers_are_read():
    batcher, paper, found, _ = make_batcher(2, 4, copies=2)
    feed(batcher, [1, 1, 0, 0])
    feed(batcher, [1, 0, 0, 1], first=4)
    assert paper.batches == [[4, 4], []]
    assert all(not running.round.finished() for running in batcher._running)
    feed(batcher, [1, 0], first=8)  # now the first buffer is needed, and the second runs meanwhile
    assert [running.round.finished() for running in batcher._running] == [False]
    assert (batcher.buffers[1][0].numbers == [0, 1]).all()
    batcher.flush()
    assert sorted(found) == list(range(10))


def test_later_rounds_run_full_batches():
    batcher, paper, _, _ = make_batcher(3, 8)
    rng = np.random.default_rng(0)
    for number in range(100):
        feed(batcher, rng.integers(0, 3, 5), first=5 * number)
        batcher.keep_up(-np.inf)
    assert all(set(run) == {8} for run in paper.batches)
    batcher.flush()
    assert all(set(run[:-2]) == {8} for run in paper.batches)  # what is left makes another full one at most


def test_only_images_that_are_due_run_in_batches_that_are_not_full():
    batcher, paper, found, _ = make_batcher(2, 4)
    feed(batcher, [1, 1], due=10.0)
    assert batcher.next_due == 10.0
    advance(batcher, now=9.0)
    assert paper.batches == [[], []]
    feed(batcher, [1], first=2, due=20.0)
    advance(batcher, now=10.0)
    assert paper.batches == [[3], [3]]
    assert batcher.next_due == np.inf
    assert sorted(found) == [0, 1, 2]


def test_expedited_images_are_due_wherever_they_are():
    batcher, paper, found, _ = make_batcher(2, 2)
    feed(batcher, [1, 0, 1], due=np.inf)
    batcher.keep_up(-np.inf)
    batcher.expedite(0, 1)
    advance(batcher, now=0.0)
    assert sorted(found) == [0, 1]
    assert paper.batches == [[2], [1]]
    batcher.expedite(2, 3)
    advance(batcher, now=0.0)
    assert sorted(found) == [0, 1, 2]


@pytest.mark.parametrize(
    ("copies", "batches"),
    [(1, [[1, 1, 2], []]), (2, [[1, 1], [1]])],
    ids=["a backend that computes at once, as on a CPU", "a backend that does not"],
)
def test_on_a_cpu_images_that_are_not_due_yet_do_not_wait_for_a_later_round(copies, batches):
    batcher, paper, found, _ = make_batcher(2, 4, copies=copies)
    feed(batcher, [0], due=0.0)
    advance(batcher, now=0.0)  # the batcher knows now whether rounds compute at once
    feed(batcher, [1], first=1, due=5.0)
    batcher.advance(5.0)  # runs round 1
    batcher.advance(5.0)  # moves the image to round 2, for which it is due
    feed(batcher, [0, 1], first=2, due=9.0)
    batcher.advance(5.0)
    assert paper.batches == batches
    advance(batcher, now=9.0)
    assert sorted(found) == [0, 1, 2, 3]


def test_images_that_are_due_let_a_few_batches_pass_and_no_more():
    batcher, paper, _, _ = make_batcher(2, 2)
    feed(batcher, [1, 0], due=0.0)  # the first image waits for another one that continues
    for number in range(1, OVERTAKEN + 1):
        assert paper.batches[1] == []
        feed(batcher, [0, 0], first=2 * number, due=0.0)
        batcher.keep_up(1.0)
    assert paper.batches[1] == [1]


def test_exits_are_delivered_before_a_later_round_starts():
    class Patient(PaperRounds):
        def run(self, s, buffer, first, count):
            if s == 1:
                assert sorted(found) == [2, 3]
            return super().run(s, buffer, first, count)

    batcher, paper, found, _ = make_batcher(2, 4, Patient(2))
    feed(batcher, [1, 1, 0, 0], due=0.0)
    advance(batcher)
    assert paper.batches == [[4], [2]]
    batcher, paper, found, _ = make_batcher(2, 2, Patient(2))  # the second buffer is full at once
    feed(batcher, [1, 0], due=np.inf)
    batcher.keep_up(-np.inf)
    found.clear()
    found.update({2: None, 3: None})
    feed(batcher, [1, 1], first=4, due=np.inf)
    batcher.keep_up(-np.inf)
    assert paper.batches[1] == [2]


def test_out_of_memory_halves_the_batch_and_loses_nothing():
    batcher, paper, found, shrunk = make_batcher(2, 64, memory=20)
    feed(batcher, [1] * 64 + [0] * 64)
    batcher.flush()
    assert shrunk == [32, 16]
    assert paper.shrinks == 3  # once to see whether freeing helps, then with each halving
    assert sorted(found) == list(range(128))
    assert max(paper.batches[0] + paper.batches[1]) == 16


def test_freeing_graphs_comes_before_smaller_batches():
    class Graphs(PaperRounds):
        """Each size that was run holds memory until it is given back."""

        held = frozenset()

        def run(self, s, buffer, first, count):
            if sum(size for _, size in self.held | {(s, count)}) > 128:
                raise OutOfPaperError
            self.held |= {(s, count)}
            return super().run(s, buffer, first, count)

        def shrink(self):
            self.held = frozenset()

    for extra in (1, 5, 12):
        batcher, _, found, shrunk = make_batcher(2, 64, Graphs(2))
        feed(batcher, [1] * (128 + extra))
        batcher.flush()
        assert sorted(found) == list(range(128 + extra))
        assert shrunk == []


def test_not_even_one_image_fits():
    batcher, _, _, _ = make_batcher(1, 4, memory=0)
    with pytest.raises(MemoryError, match="not enough memory for a single image"):
        feed(batcher, [0] * 4)


def batch_sizes(count, largest, sizes):
    """The sizes of all batches in which images run."""
    batches = []
    while sum(batches) < count:
        batches.append(batch_size(count - sum(batches), largest, sizes))
    return batches


@given(st.integers(0, 3000), st.integers(1, 600), st.booleans())
def test_batches_add_up_and_waste_little(count, largest, has_sizes):
    sizes = power_sizes(largest) if has_sizes else None
    found = batch_sizes(count, largest, sizes)
    assert sum(found) == count
    assert all(1 <= batch <= largest for batch in found)
    if sizes is not None:
        assert sum(padded_size(batch, sizes) for batch in found) <= max(1, 4 / 3 * count)
        small = [batch for batch in found if padded_size(batch, sizes) < largest]
        assert len(small) <= len(sizes)


def test_sizes_are_powers_of_two_and_the_largest():
    assert power_sizes(1) == (1,)
    assert power_sizes(8) == (1, 2, 4, 8)
    assert power_sizes(12) == (1, 2, 4, 8, 12)
    assert batch_sizes(130, 512, power_sizes(512)) == [128, 2]
    assert batch_sizes(127, 512, power_sizes(512)) == [127]
    assert batch_sizes(1100, 512, power_sizes(512)) == [512, 512, 64, 8, 4]
