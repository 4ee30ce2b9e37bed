"""Wrong answers as a gallery: a thumbnail of what the model saw, the class, and what each round said.

Letters: C channels, H side of the images, h side of a thumbnail.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from progresvit.analysis.exits import THUMBNAIL, thumbnail
from progresvit.analysis.page import Card
from progresvit.data.augment.corruption import Corruption
from progresvit.data.dataset import some_of
from progresvit.data.evaluation_batches import numbered_batches
from progresvit.data.transforms import NamedTransform
from progresvit.evaluation.answers import RoutedAnswers
from progresvit.evaluation.source import DataSource
from progresvit.io.parse import count_of
from progresvit.plots import COLOURS, DPI, WIDTH, blank_figure, in_lines, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 2
NAME = 20
"""Characters of a name beside a thumbnail."""
LINE = 0.135
"""Inches of a line of text."""
DRAWN = 24
"""Errors in the figure; the page shows all of the gallery."""
QUALITY = 90
"""JPEG quality of the thumbnails on the page: 5 kB each, a quarter of a PNG."""

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """Errors, and thumbnails of the images that were found."""

    answers: RoutedAnswers
    rows: Sequence[int]
    """Rows of the records, the most confident error first."""
    thumbnails: Mapping[int, Pixels] = field(default_factory=dict)
    """By row, (h, h) if it is grey, else (h, h, C)."""
    missing: Sequence[str] = ()
    """A line for each image that is not in the data or cannot be read."""

    def cards(self) -> list[Card]:
        """The cards of the errors on a page, with what they can be filtered by."""
        answers, cards = self.answers, []
        for row in self.rows:
            label, exit_round = int(answers.records.labels[row]), int(answers.exit_round[row])
            title, *lines = self.lines(row)
            filters = {"class": answers.class_names[label], "answer": answers.class_names[int(answers.prediction[row])]}
            if answers.threshold is not None:
                filters["exit"] = f"after round {exit_round + 1}"
            cards.append(
                Card(
                    image=_to_jpeg(self.thumbnails[row]) if row in self.thumbnails else b"",
                    title=title,
                    lines=lines,
                    marked=exit_round if answers.threshold is not None else None,
                    note=str(answers.records.ids[row]),
                    filters=filters,
                )
            )
        return cards

    def lines(self, row: int, length: int | None = None) -> list[str]:
        """The class, and what each round said; names have at most ``length`` characters."""
        answers, records = self.answers, self.answers.records

        def name(number: int) -> str:
            full = answers.class_names[number]
            return full if length is None else shorten(full, length)

        lines = [f"is {name(int(records.labels[row]))}"]
        for s in range(records.rounds):
            probability = records.top5_probabilities[row, s, 0]
            sure = f" {100 * probability:.1f} %" if np.isfinite(probability) else ""
            exits = " (exit)" if s == answers.exit_round[row] and answers.threshold is not None else ""
            lines.append(f"{s + 1}: {name(int(records.predictions[row, s]))}{sure}{exits}")
        return lines


def find_errors(answers: RoutedAnswers, most: int, source: DataSource | None = None) -> Gallery:
    """The most confident errors, with thumbnails from ``source`` if it is given.

    The thumbnails show the evaluation crop, corrupted if the images of the records were. Images are found by the ids of
    the records; an image that is missing or cannot be read has no thumbnail.
    """
    rows = answers.errors[:most].tolist()
    if source is None or not rows:
        return Gallery(answers=answers, rows=rows)
    records, dataset = answers.records, source.find()
    places = {entry.name: index for index, entry in enumerate(dataset.entries)}
    in_data = [row for row in rows if str(records.ids[row]) in places]
    if not in_data:
        raise ValueError(
            f"none of the {len(rows)} images is in {source.data} (split {source.split}): the records name "
            f"{records.ids[rows[0]]}, the data has {some_of(list(places)[:3])}. Pass the evaluated images: "
            f"data={records.header.data!r} split={records.header.split!r}"
        )
    corruption = records.header.corruption
    transform = NamedTransform(records.config, None if corruption is None else Corruption.parse(corruption))
    images = dataset.subset(places[str(records.ids[row])] for row in in_data)
    missing = {row: "not in the data" for row in rows if row not in in_data}
    thumbnails: dict[int, Pixels] = {}
    cpu = torch.device("cpu")
    for batch in numbered_batches(images, [list(range(len(in_data)))], transform=transform, workers=0, device=cpu):
        if batch.pixels is not None:  # bytes (B, C, H, H)
            thumbnails |= {in_data[number]: thumbnail(pixels) for number, pixels in zip(batch.numbers, batch.pixels)}
        missing |= {in_data[number]: why for number, why in batch.unreadable.items()}
    lines = [f"{records.ids[row]}: {missing[row]}" for row in rows if row in missing]
    return Gallery(answers=answers, rows=rows, thumbnails=thumbnails, missing=lines)


def gallery_figure(gallery: Gallery) -> Figure:
    """Thumbnails of the most confident errors; beside each its class and the answers of the rounds."""
    rows = [row for row in gallery.rows if row in gallery.thumbnails][:DRAWN]
    side = THUMBNAIL / DPI  # inches: no pixel of a .png is enlarged
    height = max(side, LINE * (gallery.answers.records.rounds + 1)) + 0.16
    lines = -(-len(rows) // COLUMNS)
    total = 0.6 + height * lines
    figure = blank_figure(height=total, layout=None)
    wrong, images = len(gallery.answers.errors), len(gallery.answers.records)
    which = (
        f"The {len(rows)} most confident of {wrong:,} errors"
        if len(rows) < wrong
        else f"All {count_of(wrong, 'error', ',')}"
    )
    title = in_lines(f"{which} on {images:,} images: class, then the answer of each round")
    figure.suptitle(title, fontsize=11, y=1 - 0.08 / total, va="top")
    for place, row in enumerate(rows):
        pixels = gallery.thumbnails[row]
        left = 0.1 + (place % COLUMNS) * (WIDTH - 0.1) / COLUMNS
        top = total - 0.55 - (place // COLUMNS) * height
        width, tall = (length / DPI for length in pixels.shape[1::-1])
        axes = figure.add_axes((left / WIDTH, (top - tall) / total, width / WIDTH, tall / total))
        axes.imshow(pixels, cmap="gray", vmin=0, vmax=255)
        axes.set_axis_off()
        for number, line in enumerate(gallery.lines(row, NAME)):
            x, y = (left + side + 0.06) / WIDTH, (top - LINE * number) / total
            figure.text(x, y, line, fontsize=7.5, va="top", color=COLOURS[1] if "(exit)" in line else "black")
    return figure


def _to_jpeg(pixels: Pixels) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=QUALITY, subsampling=0)
    return buffer.getvalue()
