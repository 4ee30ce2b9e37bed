"""The batcher with rounds that compute nothing: the bytes of each image give the round after which it exits."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from progresvit.engine.batcher import HELD_BATCHES, Batcher
from progresvit.engine.buffers import RoundBuffer, batch_sizes, padded_size, power_sizes
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


class PaperRounds:
    """Tokens carry the image's number and the rounds it has run; broken bookkeeping shows in the answers."""

    out_of_memory = (OutOfPaperError,)

    def __init__(self, rounds, sizes=None, memory=10**9):
        self.last, self.sizes, self.memory = rounds - 1, sizes, memory
        self.batches = [[] for _ in range(rounds)]
        self.shrinks = 0

    def make_buffer(self, s, capacity, side):
        return RoundBuffer(np.zeros((capacity, 2), np.int64), np.zeros((capacity, 2), np.int64) if s else None)

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
        return FinishedRound(answers, np.stack([pixels[:, 0], np.full(count, s)], axis=1))

    def move(self, source, first, running, rows, target):
        places = slice(target.fill, target.fill + len(rows))
        target.pixels[places], target.tokens[places] = source.pixels[first + rows], running.tokens[rows]

    def shrink(self):
        self.shrinks += 1


def results(s, answers, rows):
    rest = {"label": None, "probability": 0.0, "entropy": 0.0, "gmacs": 0.0, "abstained": False}
    return [Prediction(index=int(answers.index[row]), exit_round=s + 1, **rest) for row in rows]


def make_batcher(rounds, capacity, **options):
    paper = PaperRounds(rounds, **options)
    buffers = [paper.make_buffer(s, capacity, 0) for s in range(rounds)]
    shrunk = []
    return Batcher(paper, buffers, largest=capacity, make=results, shrunk=shrunk.append), paper, shrunk


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
    st.lists(st.sampled_from(["continue", "flush", "fetch"])),
    st.integers(1, 9),
)
def test_any_pattern_of_exits_comes_out_right_and_in_order(pattern, capacity, has_sizes, actions, memory):
    rounds, batches = pattern
    batcher, paper, _ = make_batcher(
        rounds, capacity, sizes=power_sizes(capacity) if has_sizes else None, memory=memory
    )
    found, exits = [], [exit_ for batch in batches for exit_ in batch]
    for number, batch in enumerate(batches):
        batcher.feed(images(batch, first=sum(map(len, batches[:number]))))
        action = actions[number % len(actions)] if actions else "continue"
        if action == "flush":
            batcher.flush()
        if action != "continue":
            found += batcher.ready()
        assert all(buffer.fill <= buffer.capacity for buffer in batcher.buffers)
    batcher.flush()
    found += batcher.ready(wait=True)
    assert [one.index for one in found] == list(range(len(exits)))
    assert [one.exit_round - 1 for one in found] == exits
    assert [sum(run) for run in paper.batches] == [sum(exit_ >= s for exit_ in exits) for s in range(rounds)]
    assert max((max(run, default=0) for run in paper.batches), default=0) <= min(capacity, memory)


def test_later_rounds_run_full_batches():
    batcher, paper, _ = make_batcher(3, 8)
    rng = np.random.default_rng(0)
    for number in range(100):
        batcher.feed(images(rng.integers(0, 3, 5), first=5 * number))
        list(batcher.ready())
    assert all(set(run) == {8} for run in paper.batches)
    batcher.flush()
    assert all(set(run[:-2]) == {8} for run in paper.batches)  # what is left makes another full one at most


def test_an_image_that_cannot_be_opened_keeps_its_place():
    batcher, _, _ = make_batcher(2, 4)
    pixels = images([0, 1, 1])
    pixels[:, 0] = [0, 2, 4]
    batcher.feed(pixels, {1: Prediction.failed("torn"), 3: Prediction.failed("empty")})
    batcher.flush()
    found = list(batcher.ready(wait=True))
    assert [(one.index, one.error) for one in found] == [(0, None), (-1, "torn"), (2, None), (-1, "empty"), (4, None)]


def test_only_buffers_with_an_image_past_its_deadline_are_run():
    batcher, paper, _ = make_batcher(2, 4)
    batcher.feed(images([1, 1]))
    batcher.flush(before=time.monotonic() - 60)
    assert paper.batches == [[], []]
    assert batcher.oldest() <= time.monotonic()
    batcher.flush(before=time.monotonic())
    assert paper.batches == [[2], [2]]
    assert batcher.oldest() is None
    assert [one.exit_round for one in batcher.ready()] == [2, 2]


def test_results_held_back_are_bounded():
    batcher, paper, _ = make_batcher(2, 2)
    batcher.feed(images([1, 0]))  # the first image waits for a second one that continues, and all others wait behind it
    for number in range(1, HELD_BATCHES):
        batcher.feed(images([0, 0], first=2 * number))
        assert list(batcher.ready()) == []
    batcher.feed(images([0, 0], first=2 * HELD_BATCHES))
    assert sum(paper.batches[1]) == 1
    assert len(list(batcher.ready())) == 2 * (HELD_BATCHES + 1)


def test_out_of_memory_halves_the_batch_and_loses_nothing():
    batcher, paper, shrunk = make_batcher(2, 64, memory=20)
    batcher.feed(images([1] * 64 + [0] * 64))
    batcher.flush()
    assert shrunk == [32, 16]
    assert paper.shrinks == 3  # once to see whether freeing helps, then with each halving
    found = list(batcher.ready(wait=True))
    assert [one.index for one in found] == list(range(128))
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
        paper, shrunk = Graphs(2), []
        batcher = Batcher(
            paper, [paper.make_buffer(s, 64, 0) for s in range(2)], largest=64, make=results, shrunk=shrunk.append
        )
        batcher.feed(images([1] * (128 + extra)))
        batcher.flush()
        assert [one.index for one in batcher.ready(wait=True)] == list(range(128 + extra))
        assert shrunk == []


def test_not_even_one_image_fits():
    batcher, _, _ = make_batcher(1, 4, memory=0)
    with pytest.raises(MemoryError, match="not enough memory for a single image"):
        batcher.feed(images([0] * 4))


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
