"""What is known of the bundled models without measuring: their data, decisions, limits and terms, for their cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

DOGS = (
    *("n02086240", "n02087394", "n02088364", "n02089973", "n02093754"),
    *("n02096294", "n02099601", "n02105641", "n02111889", "n02115641"),
)
"""The classes of Imagewoof: Shih-Tzu to dingo."""
EASY = (
    *("n01440764", "n02102040", "n02979186", "n03000684", "n03028079"),
    *("n03394916", "n03417042", "n03425413", "n03445777", "n03888257"),
)
"""The classes of Imagenette: tench to parachute. One of them, the English springer, is a dog too."""


@dataclass(frozen=True, kw_only=True)
class About:
    """Facts about a bundled model that are not measured: its data and terms."""

    data: str
    """The name of the evaluation images."""
    classes: str
    """A description of the classes, to follow their number."""
    sources: tuple[str, ...]
    """Where the training images come from."""
    shift: str = ""
    """The name of the second dataset."""
    shift_note: str = ""
    plain_note: str = ""
    """How the plain ViTs were trained."""
    chosen: str = "The checkpoint was selected"
    """What was chosen on the held-out images."""
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Ids of the classes of each group. An average over all classes hides that one group is harder."""
    seen_note: str = ""
    """Decisions that were made after inspecting results on the evaluation images."""
    ood_note: str
    limits: tuple[str, ...]
    terms: str
    """Terms of the training images."""


ABOUT = {
    "imagenet-tiny": About(
        data="ImageNet-1k validation",
        classes="classes: the classes of ImageNet-1k in their usual order",
        sources=(
            "ImageNetV2, the parts threshold-0.7 and top-images, without any image of matched-frequency",
            "one training image per class of ImageNet-1k (the public collection imagenet-sample-images)",
            "Stanford Dogs",
            "Imagenette and Imagewoof, training images, without those that come from ImageNet's validation set",
        ),
        shift="ImageNetV2 matched-frequency",
        shift_note="These images are also in the other parts of ImageNetV2, threshold-0.7 and top-images, so they "
        "are easier than all 10,000 images of matched-frequency. The model was trained on other images of these two "
        "parts, so the source is not new to it.",
        plain_note="fine-tuned on the same images with the same teachers, epochs and interpolation, ",
        chosen="Rounds, learning rate and the weight of the interpolation were chosen",
        seen_note="One training decision, to interpolate, was made after inspecting results on the evaluation images "
        "(docs/models.md), so the accuracy of the last round may be optimistic.",
        ood_note="The rows of the unknown classes were removed from the head for this measurement. The model was "
        "trained on images of them, so entirely new classes are probably harder to detect.",
        limits=(
            "Expect lower accuracy on images unlike ImageNet's: drawings, night scenes, small distant objects.",
            "ImageNet's classes are uneven: many are breeds of dogs, hardly any show people.",
        ),
        terms="The images are ImageNet's and ImageNetV2's; ImageNet's terms allow non-commercial research and "
        "education",
    ),
    "nettewoof-tiny": About(
        data="Imagenette and Imagewoof, validation",
        classes="classes of ImageNet: the classes of Imagenette, ten different objects (easy ten), and of Imagewoof "
        "(ten dogs)",
        sources=(
            "Imagenette and Imagewoof, training images, squashed to 224×224 pixels, without those that come from "
            "ImageNet's validation set",
        ),
        groups={"easy ten": EASY, "ten dogs": DOGS},
        seen_note="The number of epochs was set after a first, longer run had been scored on them.",
        ood_note="The unknown images show other classes of ImageNet, on which the start and the teachers were trained, "
        "so entirely new classes are probably harder to detect.",
        limits=(
            "Expect lower accuracy on images unlike ImageNet's: drawings, night scenes, small distant objects. It was "
            "trained on squashed squares, while your images are cropped.",
            "Its accuracy is not comparable with that of models of 1,000 classes: fewer classes are easier.",
        ),
        terms="The images are ImageNet's, whose terms allow non-commercial research and education",
    ),
}
