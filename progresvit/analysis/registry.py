"""The figures of ``progresvit analyze``: what each shows, what it needs, its options and its functions.

The commands and the report of all figures are made from this table. It imports no figure, so the command line starts
without torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from progresvit.analysis.sample import Sample
    from progresvit.io.resumable import Progress
    from progresvit.model.interface import RoundModel
    from progresvit.table import Table

IMAGES = 300
"""Default number of images of a sample."""

Needs = Literal["model", "image", "images", "gpu"]
"""What a figure is made of besides the model: nothing, one image, a sample of labelled images, or a GPU to measure."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of one figure."""

    type: type[str] | type[int] | type[float]
    help: str
    default: str | float | None = None
    """None is the default of the figure's function."""
    least: int | None = None
    """Smallest number."""
    parse: Literal["numbers", "integers", "names", "threshold"] | None = None
    """How the text of a list or a threshold is read."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What figures are made of."""

    name: str
    """The model as the user named it."""
    model: RoundModel | None = None
    """On its device; None if processes of their own open it."""
    folder: Path | None = None
    """May hold the model's settings."""
    sample: Sample | None = None
    image: Tensor | None = None
    """Normalised, (1, C, H, H): channels C and side H."""


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """A figure and its tables; the file of its name defines its functions."""

    name: str
    title: str
    text: str
    """What the report says that it shows."""
    help: str
    """What the command says that it does."""
    needs: Needs = "images"
    options: Mapping[str, Option] = field(default_factory=dict)
    measure: str = ""
    """The function that makes the numbers, if it is not called like the file."""
    summaries: Mapping[str, str] = field(default_factory=dict)
    """Functions of further tables, by the ending of their file."""
    printed: str | None = None
    """The ending of the summary that the command prints."""

    def run(self, subject: Subject, progress: Progress, **options: Any) -> Any:
        """The numbers of the figure; without an option, its default applies."""
        function = self._function(self.measure or self._file)
        if "threshold" in self.options:
            options["threshold"] = exit_threshold(subject, options.get("threshold"))
        if self.needs == "model":
            return function(subject.model, **options)
        if self.needs == "gpu":
            return function(subject.name, progress=progress, **options)
        if self.needs == "image":
            return function(subject.model, subject.image, **options)
        return function(subject.model, subject.sample, progress=progress, **options)

    def tables(self, numbers: Any) -> dict[str, Table]:
        """Every number of the figure, then its summaries, by the name of their file in a report."""
        functions = {self.name: f"{self._file}_table"}
        functions |= {f"{self.name}-{ending}": function for ending, function in self.summaries.items()}
        return {name: self._function(function)(numbers) for name, function in functions.items()}

    def figure(self, numbers: Any) -> Figure:
        """The drawn figure."""
        figure: Figure = self._function(f"{self._file}_figure")(numbers)
        return figure

    @property
    def _file(self) -> str:
        return self.name.replace("-", "_")

    def _function(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(importlib.import_module(f"progresvit.analysis.{self._file}"), name)
        return function


def exit_threshold(
    subject: Subject, threshold: str | float | tuple[float, ...] | None = None
) -> float | tuple[float, ...] | None:
    """The threshold as numbers; by default the model's near-lossless setting, or None if it has no such setting.

    Args:
        subject: The model and its folder.
        threshold: Numbers, or the name or file of a setting.
    """
    from progresvit.io.weights import weights_hash
    from progresvit.routing.settings import default_setting, find_setting

    if threshold is not None and not isinstance(threshold, str):
        return threshold
    setting = default_setting(subject.folder) if threshold is None else find_setting(threshold, subject.folder)
    if setting is None:
        return None
    assert subject.model is not None
    setting.check_use(len(subject.model.config.rounds), None)
    setting.check_weights(weights_hash(subject.model))
    return setting.threshold


_STRENGTHS = Option(type=str, help="Comma-separated strengths; 0 changes nothing.", parse="numbers")

DIAGNOSTICS = {
    diagnostic.name: diagnostic
    for diagnostic in (
        Diagnostic(
            name="gates",
            title="Gates",
            text="The multipliers of PSG in every round, branch, block and channel, on one colour scale; white is 1.",
            help="Draw all multipliers of PSG: rounds, branches, blocks and channels, on one colour scale.",
            needs="model",
            measure="round_gates",
        ),
        Diagnostic(
            name="gate-distributions",
            title="Distributions of the gates",
            text="The multipliers over the channels of the first, the middle and the last block.",
            help="Draw the distributions of PSG's multipliers over the channels of chosen blocks, by branch and round.",
            needs="model",
            options={
                "blocks": Option(
                    type=str,
                    help="Comma-separated blocks, from 1; first, middle and last by default.",
                    parse="integers",
                )
            },
        ),
        Diagnostic(
            name="gate-depth",
            title="Gates over the blocks",
            text="Mean and spread of the multipliers over the channels, and how much they differ between rounds on the "
            "channels that both have. Gates that are far from 1 but differ little are static scales.",
            help="Draw the mean and spread of PSG's multipliers over the blocks, and how much they differ between "
            "rounds.",
            needs="model",
        ),
        Diagnostic(
            name="similarity",
            title="Similarity to the last layer",
            text="Cosine between every block output and the last block's output in the last round, for the same image.",
            help="Draw the similarity of every block output to the output of the last block of the last round.",
        ),
        Diagnostic(
            name="trajectories",
            title="Trajectories of the class token",
            text="Class-mean class tokens after every block in their first two principal components; dashed from one "
            "round to the next. Separation compares the spread of the class means with the spread within a class.",
            help="Draw the paths of class-mean class tokens through the blocks of all rounds, by their principal "
            "components.",
            options={
                "classes": Option(
                    type=str,
                    help="Comma-separated classes, by name or folder name; five by default.",
                    parse="names",
                )
            },
        ),
        Diagnostic(
            name="low-pass",
            title="Blur of round 1's input",
            text="Only round 1 sees the blurred image. A loss shows that the last round uses details that round 1 saw.",
            help="Blur the input of round 1 alone and draw the accuracy of the last round.",
            options={"strengths": _STRENGTHS},
        ),
        Diagnostic(
            name="token-swap",
            title="Round 1's tokens replaced",
            text="The last round with tokens of round 1 from another image, or with shuffled ones.",
            help="Replace round 1's tokens by tokens of other images, or shuffle them, and draw the accuracy of the "
            "last round.",
            options={
                "strength": Option(
                    type=float, help="Share of the other tokens: 0 changes nothing, 1 replaces.", default=1.0
                )
            },
        ),
        Diagnostic(
            name="noise-replacement",
            title="Round 1's output replaced by noise",
            text="Round 1's last block output is mixed with noise of the same mean and deviation.",
            help="Replace round 1's last block output by noise and draw accuracy and confidence of the last round.",
            options={"strengths": _STRENGTHS},
        ),
        Diagnostic(
            name="exits",
            title="Exits",
            text="Images with the lowest and the highest entropy after round 1, the share of each class that exits "
            "there, and what further rounds repair and break.",
            help="Draw images that exit early and late, exit shares by class, and what later rounds repair and break.",
            options={
                "threshold": Option(
                    type=str,
                    help="Threshold, one per round except the last (0.2,0.4), a setting file, or the name of a "
                    "setting in the model folder. By default near-lossless, of the model or of these images.",
                    parse="threshold",
                )
            },
            summaries={"shares": "exit_share_table", "repairs": "repair_table"},
            printed="repairs",
        ),
        Diagnostic(
            name="attention",
            title="Attention",
            text="Attention of the class token to the patches of the first image of the sample, in the last block.",
            help="Draw the attention of the class token in the last block: every head in every round, for one image.",
            needs="image",
            measure="attention_of",
        ),
        Diagnostic(
            name="memory",
            title="Memory",
            text="Peak GPU memory of all rounds against the batch size. The weights are included.",
            help="Draw peak GPU memory against the batch size: the engine, and the model run round by round.",
            needs="gpu",
            options={
                "batches": Option(type=str, help="Comma-separated batch sizes; 1 to 512 by default.", parse="integers"),
                "precision": Option(type=str, help="fp32, bf16 or fp16.", default="bf16"),
            },
        ),
        Diagnostic(
            name="throughput",
            title="Throughput",
            text="Accuracy against the speed of the engine on these images, from round 1 alone to all rounds for all.",
            help="Draw the accuracy against the images per second of the engine, from few to all images that continue.",
            options={
                "batch": Option(type=int, help="Images per batch; 512 on a GPU, else 64.", least=1),
                "precision": Option(type=str, help="bf16 (default on a GPU), fp32 or fp16."),
                "seconds": Option(
                    type=float, help="Approximate duration of the timing of a point; 2 on a GPU, else 8.", least=0
                ),
            },
        ),
    )
}
"""By name, in the order of the report."""
