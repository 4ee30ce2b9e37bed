"""A learned router: a network predicts from a round's logits whether another round helps.

One small network per round but the last takes 23 statistics of the round's logits and gives a probability. An image
exits if the probability is below the threshold, as with entropy. Letters: B or N images, S rounds.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from progresvit.io.files import replace_file
from progresvit.io.parse import did_you_mean, former_name
from progresvit.metrics.arrays import Bools, Float32s, Ints
from progresvit.routing.calibrate import OutOfReachError
from progresvit.routing.scores import STATISTICS, logit_statistics

Target = Literal["benefit", "error", "unrecoverable"]
"""The event whose probability is predicted: ``benefit``, this round is wrong and the last one right (the paper's);
``error``, this round is wrong; ``unrecoverable``, this round and all later ones are wrong."""

EPOCHS = 6
"""Passes over the records in the paper, on 50,000 images."""
LEAST_STEPS = 100
"""Fewest optimizer steps: on a few thousand images six epochs take only a few dozen."""

_FORMER_TARGETS = {"hopeless": "unrecoverable"}

_FORMAT = "progresvit-router-1"
_FILE_KEYS = {"model_sha256": "model"}
"""Fields of the origin that have another key in files."""


@dataclass(frozen=True, kw_only=True)
class RouterOrigin:
    """The target, the images and the training that a router was fitted with."""

    target: str
    """A ``Target``, or the name of a router of your own, ``my_module:my_router``."""
    images: int
    epochs: int
    seed: int
    model_sha256: str | None = None
    """Hash of the model's weights."""

    model = former_name("model_sha256")

    def __post_init__(self) -> None:
        if ":" not in self.target:
            object.__setattr__(self, "target", _current_target(self.target))


class RouterMLP(nn.Module):
    """23 -> 256 -> 128 -> 1, with 39,681 parameters; inputs are standardised with mean and deviation of the fit."""

    mean: Tensor
    deviation: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(len(STATISTICS)))
        self.register_buffer("deviation", torch.ones(len(STATISTICS)))
        self.layers = nn.Sequential(
            nn.Linear(len(STATISTICS), 256),
            nn.LayerNorm(256),
            nn.GELU(),
            nn.Linear(256, 128),
            nn.GELU(),
            nn.Linear(128, 1),
        )

    def forward(self, statistics: Tensor) -> Tensor:
        """The logit of the probability: (B, 23) -> (B,)."""
        logit: Tensor = self.layers((statistics.float() - self.mean) / self.deviation).squeeze(-1)
        return logit


class Router(nn.Module):
    """The networks of all rounds but the last."""

    seen: Tensor
    """Hashes of the ids of the images that it was fitted on."""
    source: str = ""
    """Name and file hash of a router of your own, which its parameters alone do not identify."""

    def __init__(self, rounds: int, origin: RouterOrigin) -> None:
        super().__init__()
        if rounds < 2:
            raise ValueError("a model of one round has nothing to route.")
        self.rounds, self.origin = rounds, origin
        """Rounds of the models that it is for, and what it was fitted on."""
        self.after = nn.ModuleList(self.networks())
        self.register_buffer("seen", torch.zeros(0, dtype=torch.int64))

    def networks(self) -> list[nn.Module]:
        """A new network for each round but the last."""
        return [RouterMLP() for _ in range(self.rounds - 1)]

    def count_seen(self, ids: ArrayLike) -> int:
        """Count the images that it was fitted on; results on them are too good."""
        return int(np.isin(_hash_ids(ids), self.seen.cpu().numpy()).sum())

    def score(self, s: int, logits: Tensor) -> Tensor:
        """The probability of the target after round s, from 0: (B, K) -> (B,). Infinite where a logit is not finite."""
        return self.score_statistics(s, logit_statistics(logits))

    @torch.no_grad()
    def score_statistics(self, s: int, statistics: Tensor) -> Tensor:
        """The probability from statistics, infinite where one is not finite: (B, 23) -> (B,)."""
        with torch.autocast(statistics.device.type, enabled=False):
            probability = self.probability(s, statistics)
        return probability.where(statistics.isfinite().all(dim=-1), torch.inf)

    def probability(self, s: int, statistics: Tensor) -> Tensor:
        """The probability of the target, from finite statistics: (B, 23) -> (B,)."""
        probability: Tensor = self.after[s](statistics).sigmoid()
        return probability

    def scores(self, statistics: ArrayLike) -> Float32s:
        """Scores of records: (N, S, 23) -> (N, S). The last round's scores are not used, and infinite."""
        values = torch.from_numpy(np.array(statistics, np.float32))
        if values.ndim != 3 or values.shape[1:] != (self.rounds, len(STATISTICS)):
            raise ValueError(
                f"a router for {self.rounds} rounds takes (images, {self.rounds}, {len(STATISTICS)}) statistics, "
                f"not {tuple(values.shape)}; are the records of the same kind of model?"
            )
        values = values.to(self.seen.device)
        columns = [self.score_statistics(s, values[:, s]) for s in range(self.rounds - 1)]
        return torch.stack([*columns, torch.full_like(columns[0], torch.inf)], dim=1).cpu().numpy()


def router_targets(correct: ArrayLike, target: Target) -> Bools:
    """The events to predict, from whether each round is correct: (N, S) -> (N, S - 1)."""
    target = _current_target(target)
    right = np.asarray(correct, bool)
    if right.ndim != 2 or right.shape[1] < 2:
        raise ValueError(f"hits are images x rounds with two rounds at least, not of shape {right.shape}.")
    wrong_now: Bools = ~right[:, :-1]
    if target == "error":
        return wrong_now
    if target == "benefit":
        benefit: Bools = wrong_now & right[:, -1:]
        return benefit
    never_right: Bools = ~np.logical_or.accumulate(right[:, ::-1], axis=1)[:, ::-1]  # from here on
    return never_right[:, :-1]


def default_epochs(images: int, batch: int = 512) -> int:
    """The paper's six epochs, or more if these are fewer than ``LEAST_STEPS`` optimizer steps."""
    return max(EPOCHS, -(-LEAST_STEPS // max(1, images // batch)))


def fit_router(
    statistics: ArrayLike,
    correct: ArrayLike,
    *,
    target: Target = "benefit",
    epochs: int | None = None,
    batch: int = 512,
    lr: float = 1e-3,
    seed: int = 0,
    model: str | None = None,
    ids: ArrayLike | None = None,
) -> Router:
    """Fit a router on records with AdamW, a cosine schedule to zero and cross entropy.

    Args:
        statistics: Statistics of the logits, (N, S, 23).
        correct: Whether each round is correct, (N, S).
        target: The event whose probability is predicted.
        epochs: Passes over the records; by default :func:`default_epochs`.
        batch: Images per step.
        lr: Peak learning rate.
        seed: Seed of the weights and the order.
        model: Hash of the model's weights, kept with the router.
        ids: Names of the images, (N,); their hashes are kept with the router.
    """
    values = torch.from_numpy(np.array(statistics, np.float32))
    epochs = default_epochs(len(values), batch) if epochs is None else epochs
    events = torch.from_numpy(router_targets(correct, target)).float()
    if len(values) != len(events):
        raise ValueError(f"statistics of {len(values)} images with hits of {len(events)}; give one of each per image.")
    finite = values.isfinite().all(dim=-1).all(dim=-1)
    values, events = values[finite], events[finite]
    for s in range(events.shape[1]):
        positives = int(events[:, s].sum())
        if not 0 < positives < len(events):
            raise OutOfReachError(
                f"{positives} of {len(events)} images are examples of {target!r} after round {s + 1}; a router needs "
                "both kinds. Evaluate on more images, or on images that the model was not trained on."
            )
    origin = RouterOrigin(target=target, images=len(values), epochs=epochs, seed=seed, model_sha256=model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        router = Router(values.shape[1], origin)
        if ids is not None:
            router.seen = torch.from_numpy(_hash_ids(ids))
        for s, network in enumerate(router.after):
            assert isinstance(network, RouterMLP)
            _fit(network, values[:, s], events[:, s], epochs=epochs, batch=batch, lr=lr)
    return router.eval().requires_grad_(False)


def _current_target(target: str) -> Target:
    """The target with this present or former name."""
    name = _FORMER_TARGETS.get(target, target)
    if name not in get_args(Target):
        raise ValueError(f"unknown target {target!r}; {did_you_mean(target, get_args(Target))}")
    return name  # type: ignore[return-value]  # checked


def _hash_ids(ids: ArrayLike) -> Ints:
    names = np.asarray(ids, np.str_).tolist()
    return np.array([int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True) for name in names])


def _fit(network: RouterMLP, inputs: Tensor, events: Tensor, *, epochs: int, batch: int, lr: float) -> None:
    network.mean.copy_(inputs.mean(dim=0))
    network.deviation.copy_(inputs.std(dim=0, correction=0).clamp(min=1e-6))
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=0.01)
    batches = max(1, len(inputs) // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)
    for _ in range(epochs):
        for rows in torch.randperm(len(inputs)).tensor_split(batches):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(network(inputs[rows]), events[rows]).backward()
            optimizer.step()
            schedule.step()


def save_router(router: Router, path: str | Path) -> Path:
    """Write one safetensors file, with the origin as metadata."""
    origin = {_FILE_KEYS.get(name, name): value for name, value in asdict(router.origin).items()}
    about = {"format": _FORMAT, "rounds": str(router.rounds), "origin": json.dumps(origin)}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, save({key: value.contiguous() for key, value in router.state_dict().items()}, metadata=about))
    return target


def router_hash(router: Router) -> str:
    """SHA-256 of the router's parameters, buffers and source."""
    weights = save({key: value.contiguous() for key, value in router.state_dict().items()})
    return hashlib.sha256(weights + router.source.encode()).hexdigest()


def load_router(path: str | Path) -> Router:
    """Read a router that ``save_router`` wrote."""
    if not Path(path).is_file():
        raise ValueError(f"there is no router at {path}; make one with the command progresvit fit-router.")
    try:
        with safe_open(path, framework="pt") as file:
            about, weights = file.metadata() or {}, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file ({error}); fit the router again.") from error
    if about.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a router; make one with the command progresvit fit-router.")
    try:
        names = {key: name for name, key in _FILE_KEYS.items()}
        origin = {names.get(key, key): value for key, value in json.loads(about["origin"]).items()}
        router = Router(int(about["rounds"]), RouterOrigin(**origin))
        router.seen = weights["seen"]
        router.load_state_dict(weights)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged or of another version of the library; fit the router again.") from error
    return router.eval().requires_grad_(False)
