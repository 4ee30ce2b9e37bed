"""The figures of ``progresvit analyze`` by name: what each shows, and how it is made with default options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from progresvit.analysis.attention import attention_figure, attention_of, attention_table
from progresvit.analysis.exits import Exits, exit_share_table, exits, exits_figure, exits_table, repair_table
from progresvit.analysis.gate_depth import gate_depth, gate_depth_figure, gate_depth_table
from progresvit.analysis.gate_distributions import (
    gate_distributions,
    gate_distributions_figure,
    gate_distributions_table,
)
from progresvit.analysis.gates import gates_figure, gates_table, round_gates
from progresvit.analysis.low_pass import low_pass, low_pass_figure, low_pass_table
from progresvit.analysis.memory import memory, memory_figure, memory_table
from progresvit.analysis.noise_replacement import (
    noise_replacement,
    noise_replacement_figure,
    noise_replacement_table,
)
from progresvit.analysis.sample import Progress, Sample
from progresvit.analysis.similarity import similarity, similarity_figure, similarity_table
from progresvit.analysis.throughput import throughput, throughput_figure, throughput_table
from progresvit.analysis.token_swap import token_swap, token_swap_figure, token_swap_table
from progresvit.analysis.trajectories import trajectories, trajectories_figure, trajectories_table
from progresvit.data.transforms import normalise
from progresvit.io.weights import weights_hash
from progresvit.model.interface import RoundModel
from progresvit.routing.settings import DEFAULT, find_setting, setting_names
from progresvit.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Given:
    """What figures are made of."""

    model: RoundModel
    """On its device."""
    name: str
    """The model as the user named it."""
    folder: Path | None
    """May hold the model's settings."""
    sample: Sample


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """A figure and its table."""

    title: str
    text: str
    """What it shows."""
    run: Callable[[Given, Progress], Any]
    table: Callable[[Any], Table]
    figure: Callable[[Any], Figure]
    summaries: Mapping[str, Callable[[Any], Table]] = field(default_factory=dict)
    """Further tables by name."""


def exit_threshold(
    given: Given, wanted: str | float | tuple[float, ...] | None = None
) -> float | tuple[float, ...] | None:
    """The threshold that was asked for, by default the model's near-lossless setting; None if it has no such setting.

    Args:
        given: The model and its folder.
        wanted: Numbers, or the name or file of a setting.
    """
    if wanted is None and DEFAULT in setting_names(given.folder):
        wanted = DEFAULT
    if not isinstance(wanted, str):
        return wanted
    setting = find_setting(wanted, given.folder)
    setting.check_use(len(given.model.config.rounds), None)
    setting.check_weights(weights_hash(given.model))
    return setting.threshold


def _exits(given: Given, progress: Progress) -> Exits:
    return exits(given.model, given.sample, exit_threshold(given), progress=progress)


def _attention(given: Given, progress: Progress) -> Any:
    return attention_of(given.model, normalise(given.sample.pixels[:1], given.model.config))


DIAGNOSTICS = {
    "gates": Diagnostic(
        title="Gates",
        text="The multipliers of PSG in every round, branch, block and channel, on one colour scale; white is 1.",
        run=lambda given, _: round_gates(given.model),
        table=gates_table,
        figure=gates_figure,
    ),
    "gate-distributions": Diagnostic(
        title="Distributions of the gates",
        text="The multipliers over the channels of the first, the middle and the last block.",
        run=lambda given, _: gate_distributions(given.model),
        table=gate_distributions_table,
        figure=gate_distributions_figure,
    ),
    "gate-depth": Diagnostic(
        title="Gates over the blocks",
        text="Mean and spread of the multipliers over the channels, and how much they differ between rounds on the "
        "channels that both have. Gates that are far from 1 but differ little are static scales.",
        run=lambda given, _: gate_depth(given.model),
        table=gate_depth_table,
        figure=gate_depth_figure,
    ),
    "similarity": Diagnostic(
        title="Similarity to the last layer",
        text="Cosine of every block output to that of the last block of the last round, for the same image.",
        run=lambda given, progress: similarity(given.model, given.sample, progress=progress),
        table=similarity_table,
        figure=similarity_figure,
    ),
    "trajectories": Diagnostic(
        title="Trajectories of the class token",
        text="Class-mean class tokens after every block in their first two principal components; dashed from one round "
        "to the next. Separation compares the spread of the class means with that of the images of a class.",
        run=lambda given, progress: trajectories(given.model, given.sample, progress=progress),
        table=trajectories_table,
        figure=trajectories_figure,
    ),
    "low-pass": Diagnostic(
        title="Blur of round 1's input",
        text="Only round 1 sees the blurred image. A loss shows that the last round uses details that round 1 saw.",
        run=lambda given, progress: low_pass(given.model, given.sample, progress=progress),
        table=low_pass_table,
        figure=low_pass_figure,
    ),
    "token-swap": Diagnostic(
        title="Round 1's tokens replaced",
        text="The last round with tokens of round 1 from another image, or with shuffled ones.",
        run=lambda given, progress: token_swap(given.model, given.sample, progress=progress),
        table=token_swap_table,
        figure=token_swap_figure,
    ),
    "noise-replacement": Diagnostic(
        title="Round 1's output replaced by noise",
        text="Round 1's last block output is mixed with noise of the same mean and deviation.",
        run=lambda given, progress: noise_replacement(given.model, given.sample, progress=progress),
        table=noise_replacement_table,
        figure=noise_replacement_figure,
    ),
    "exits": Diagnostic(
        title="Exits",
        text="Images with the lowest and the highest entropy after round 1, the share of each class that exits there, "
        "and what further rounds repair and break.",
        run=_exits,
        table=exits_table,
        figure=exits_figure,
        summaries={"shares": exit_share_table, "repairs": repair_table},
    ),
    "attention": Diagnostic(
        title="Attention",
        text="Attention of the class token to the patches of the first image of the sample, in the last block.",
        run=_attention,
        table=attention_table,
        figure=attention_figure,
    ),
    "memory": Diagnostic(
        title="Memory",
        text="Peak GPU memory of all rounds against the batch size. The weights are included.",
        run=lambda given, progress: memory(given.name, progress=progress),
        table=memory_table,
        figure=memory_figure,
    ),
    "throughput": Diagnostic(
        title="Throughput",
        text="Accuracy against the speed of the engine on these images, from round 1 alone to all rounds for all.",
        run=lambda given, progress: throughput(given.model, given.sample, progress=progress),
        table=throughput_table,
        figure=throughput_figure,
    ),
}
