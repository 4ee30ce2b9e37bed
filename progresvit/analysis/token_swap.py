"""Token swap: the last round with round 1's tokens of another image, or with its own tokens in shuffled order.

The class token, the patch tokens or all tokens that round 1 hands on are replaced by the tokens of another image, of
the same class or of another class. Or the patch tokens are shuffled in space, differently for each image. Each image
gives its tokens to exactly one other image. With a strength a below 1, tokens become (1 - a) times the image's own plus
a times the others. The later rounds see the image itself.

Letters: N images, T tokens of round 1 (the class token first, then P patches), d channels.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from progresvit.analysis.interventions import (
    EFFECT_COLUMNS,
    Effect,
    Interventions,
    Outcome,
    change_words,
    check_strengths,
    widened,
)
from progresvit.analysis.sample import Sample
from progresvit.io.resumable import Progress
from progresvit.model.interface import RoundModel
from progresvit.plots import COLOURS, MARKERS, new_panels
from progresvit.table import Column, Row, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "token-swap"
Tokens = Literal["class token", "patch tokens", "all tokens"]
Donor = Literal["same class", "other class", "shuffled in space"]

CONDITIONS: tuple[tuple[Tokens, Donor], ...] = (
    ("class token", "same class"),
    ("class token", "other class"),
    ("patch tokens", "same class"),
    ("patch tokens", "other class"),
    ("patch tokens", "shuffled in space"),
    ("all tokens", "same class"),
    ("all tokens", "other class"),
)
MIXING = 10
"""Random exchanges per image, after which the donors of another class are mixed."""


@dataclass(frozen=True)
class Swapped:
    """A condition (which tokens come from which image) and its effect."""

    tokens: Tokens
    donor: Donor
    strength: float
    untouched: Outcome
    effect: Effect


def token_swap(
    model: RoundModel, sample: Sample, strength: float = 1.0, *, seed: int = 0, progress: Progress | None = None
) -> tuple[Swapped, ...]:
    """The accuracy of the last round with other tokens of round 1.

    Args:
        model: A classifier whose rounds build on each other.
        sample: The images: two or more of each class, and no class with more than half of them.
        strength: Share of the other tokens, from 0 (nothing changes) to 1.
        seed: Seed of the donors and of the order of patches.
        progress: Called after each batch.
    """
    check_strengths([strength], NAME)
    donors = find_donors(sample.labels, sample.class_names, seed=seed)
    runs = Interventions(model, sample, name=NAME, runs=len(CONDITIONS) + 1, progress=progress)
    own = runs.first_round()
    untouched = runs.later_rounds(own.__getitem__)
    order = patch_order(own, seed=seed)
    effects = []
    for tokens, donor in CONDITIONS:

        def swapped(rows: slice, tokens: Tokens = tokens, donor: Donor = donor) -> Tensor:
            shuffled = donor == "shuffled in space"
            other = shuffle_patches(own[rows], order[rows]) if shuffled else own[donors[donor][rows]]
            return mix(own[rows], other, tokens, strength)

        outcome = runs.later_rounds(swapped)
        effects.append(Swapped(tokens, donor, strength, untouched, Effect.of(outcome, untouched)))
    return tuple(effects)


def mix(own: Tensor, other: Tensor, tokens: Tokens, strength: float) -> Tensor:
    """Replace some tokens of each image by tokens of another: (N, T, d), (N, T, d) -> (N, T, d)."""
    part = {"class token": slice(0, 1), "patch tokens": slice(1, None), "all tokens": slice(None)}[tokens]
    mixed = own.clone()
    mixed[:, part] = (1 - strength) * own[:, part] + strength * other[:, part]
    return mixed


def patch_order(tokens: Tensor, *, seed: int) -> Tensor:
    """A random order of the patch tokens of each image: (N, T, d) -> (N, P)."""
    images, count, _ = tokens.shape
    return torch.rand(images, count - 1, generator=torch.Generator().manual_seed(seed)).argsort(dim=1)


def shuffle_patches(tokens: Tensor, order: Tensor) -> Tensor:
    """The patch tokens of each image in its order: (N, T, d), (N, P) -> (N, T, d)."""
    patches = tokens[:, 1:].gather(1, order[..., None].expand(-1, -1, tokens.shape[-1]))  # (N, P, d)
    return torch.cat([tokens[:, :1], patches], dim=1)


def find_donors(labels: Tensor, names: Mapping[int, str], *, seed: int) -> dict[Donor, Tensor]:
    """A donor of the same class and a donor of another class for each image; each is a permutation, (N,)."""
    counts = Counter(labels.tolist())
    few, many = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    if counts[few] < 2:
        raise ValueError(
            f"too few images per class: {NAME} needs two of each class, and there is {counts[few]} of {names[few]!r} "
            f"among {len(labels)} images; take more (images=…), or classes that have more."
        )
    if 2 * counts[many] > len(labels):
        raise ValueError(
            f"{NAME} needs for each image one of another class, and {counts[many]} of {len(labels)} images are of "
            f"{names[many]!r}; take more (images=…), or add images of other classes."
        )
    rng = random.Random(seed)
    rows: dict[int, list[int]] = {}
    for row, label in enumerate(labels.tolist()):
        rows.setdefault(label, []).append(row)
    for own in rows.values():
        rng.shuffle(own)
    ordered = [row for own in rows.values() for row in own]  # class after class
    same = {row: after for own in rows.values() for row, after in zip(own, own[1:] + own[:1])}
    shift = counts[many]  # at least the size of every class, so the image there is of another one
    other = dict(zip(ordered, ordered[shift:] + ordered[:shift]))
    _exchange(other, labels.tolist(), rng)
    donors: dict[Donor, dict[int, int]] = {"same class": same, "other class": other}
    return {donor: torch.tensor([rows_of[row] for row in range(len(labels))]) for donor, rows_of in donors.items()}


def _exchange(donors: dict[int, int], labels: Sequence[int], rng: random.Random) -> None:
    """Exchange donors of random pairs of images wherever both still are of other classes."""
    for _ in range(MIXING * len(labels)):
        first, second = rng.randrange(len(labels)), rng.randrange(len(labels))
        if labels[donors[second]] != labels[first] and labels[donors[first]] != labels[second]:
            donors[first], donors[second] = donors[second], donors[first]


def token_swap_table(effects: Sequence[Swapped]) -> Table:
    """A row for each condition, after one for the untouched model."""
    columns = [Column(key, key, left=True) for key in ("tokens", "donor")]
    untouched = Effect.of(effects[0].untouched, effects[0].untouched).row()
    unknown = {key: None for key in untouched if "change" in key}
    rows = [{"tokens": "none", "donor": None, "strength": 0.0, **untouched, **unknown}]
    rows += [
        {"tokens": condition.tokens, "donor": condition.donor, "strength": condition.strength, **condition.effect.row()}
        for condition in effects
    ]
    return Table("Round 1's tokens replaced", [*columns, Column("strength", "strength"), *EFFECT_COLUMNS], rows)


def token_swap_figure(effects: Sequence[Swapped]) -> Figure:
    """Accuracy and correct-class confidence of each condition; a line marks the untouched model."""
    return draw_token_swap(token_swap_table(effects).rows)


def draw_token_swap(rows: Sequence[Row]) -> Figure:
    """The figure of the rows of a table, the first of which is the untouched model."""
    untouched, swapped = rows[0], rows[1:]
    most = max(swapped, key=lambda row: abs(float(row["accuracy_change"])))
    figure, panels = new_panels(
        title=f"Of {len(swapped)} swaps, “{most['tokens']}, {most['donor']}” changes top-1 most: {change_words(most)}",
        xs=("top-1 of the last round (%)", "correct-class confidence (%)"),
        y="",
        height=4.2,
    )
    for axes, measure in zip(panels, ("accuracy", "confidence")):
        for place, row in enumerate(swapped):
            number = get_args(Donor).index(row["donor"])
            value, change, low, high = (
                100 * row[f"{measure}{end}"] for end in ("", "_change", "_change_low", "_change_high")
            )
            colour, marker, reach = COLOURS[number], MARKERS[number], [[change - low], [high - change]]
            axes.errorbar([value], [-place], xerr=reach, color=colour, marker=marker, capsize=3)
        axes.axvline(100 * untouched[measure], color="0.5", linewidth=1)
        axes.set_title(f"untouched (line): {100 * untouched[measure]:.1f} %", fontsize=10)
        axes.set_xlim(widened(*axes.get_xlim()))
    panels[0].set_yticks(
        [-place for place in range(len(swapped))], [f"{row['tokens']},\n{row['donor']}" for row in swapped]
    )
    panels[0].tick_params(axis="y", labelsize=9)
    figure.supxlabel("bars: 95 % interval of the change", fontsize=9)
    return figure
