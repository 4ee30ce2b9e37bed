"""The parts of DINO: projection head, loss, centring, momentum and the measures of collapse, without a training run.

Letters: B images, V views (crops) of an image, G global ones among them, K prototypes, d channels of a class token.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from progresvit.config import BackboneConfig
from progresvit.model import slicing


class DINOHead(nn.Module):
    """A three-layer MLP, L2 normalisation, and the cosine to K prototypes.

    All rounds share the head: its first layer is sliced to the width of the class token, like every layer of the
    backbone. The prototypes are rows of norm 1 (weight normalisation with a fixed length).

    Args:
        width: Channels of the widest class token.
        hidden: Channels of the two hidden layers.
        bottleneck: Channels before the prototypes.
        prototypes: Outputs.
    """

    def __init__(self, *, width: int, hidden: int, bottleneck: int, prototypes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, bottleneck)
        self.last = nn.Linear(bottleneck, prototypes, bias=False)
        for layer in (self.fc1, self.fc2, self.fc3, self.last):
            trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, class_token: Tensor) -> Tensor:
        x = F.gelu(slicing.linear(class_token, self.fc1))  # (B, d) -> (B, hidden)
        x = self.fc3(F.gelu(self.fc2(x)))  # (B, hidden) -> (B, bottleneck)
        return F.linear(F.normalize(x, dim=-1), F.normalize(self.last.weight, dim=-1))  # -> (B, K)


def teacher_probabilities(logits: Tensor, centre: Tensor, temperature: float) -> Tensor:
    """Centre and sharpen the teacher's logits: (…, B, K), (K,) -> (…, B, K)."""
    return ((_wide(logits) - centre) / temperature).softmax(dim=-1)


def dino_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Mean cross entropy of each student view with each other teacher view of the same image.

    The first G student views are the teacher's views.

    Args:
        student: Logits, (V, B, K).
        teacher: Probabilities, (G, B, K).
        temperature: Divides the student's logits.
    """
    views, global_views = len(student), len(teacher)
    with torch.autocast(student.device.type, enabled=False):
        z = _wide(student) / temperature
        # CE(t, s) = logsumexp(z) - t · z, and the sum over views goes into the product
        normaliser = z.logsumexp(dim=-1)  # (V, B, K) -> (V, B)
        others = z.sum(dim=0) - z[:global_views]  # without the teacher's own view: (G, B, K)
        pairs = normaliser.sum(dim=0) - normaliser[:global_views] - (teacher * others).sum(dim=-1)  # (G, B)
        loss: Tensor = pairs.sum(dim=0).mean() / (global_views * (views - 1))
        return loss


def momentum_at(step: int, total_steps: int, start: float) -> float:
    """The teacher's momentum: a cosine from ``start`` to 1 over the run."""
    return 1 - (1 - start) * (math.cos(math.pi * step / total_steps) + 1) / 2


def entropy(probabilities: Tensor) -> Tensor:
    """Entropy in nats: (…, K) -> (…)."""
    summed: Tensor = torch.special.entr(probabilities).sum(dim=-1)
    return summed


def spread(probabilities: Tensor) -> Tensor:
    """Mean entropy of the teacher's distributions, and entropy of their mean: (G, B, K) -> (2,).

    Their difference is the information of the output about the image. If it is 0, the teacher has collapsed: each image
    has the uniform distribution (both are ln K), or all images have the same distribution.
    """
    each = entropy(probabilities).mean()
    return torch.stack([each, entropy(probabilities.mean(dim=(0, 1)))])


def local_resolutions(config: BackboneConfig, local_side: int) -> list[int]:
    """Side of the local crops in each round: scaled like the image, to the nearest multiple of the patch size."""
    patch, last = config.patch_size, config.rounds[-1].resolution
    sides = [local_side * round_.resolution / last for round_ in config.rounds]
    if min(sides) < patch:
        number = sides.index(min(sides))
        raise ValueError(
            f"task_options.local_side: local crops of {local_side} pixels are {sides[number]:.3g} pixels in round "
            f"{number + 1}, smaller than a patch of {patch}; use "
            f"at least {math.ceil(patch * last / config.rounds[number].resolution)}."
        )
    return [math.floor(side / patch + 0.5) * patch for side in sides]


def _wide(values: Tensor) -> Tensor:
    """At least float32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
