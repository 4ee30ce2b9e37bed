"""The engine: a model and a policy, pictures in, predictions out.

After each round only the images that go on are kept, so an image costs no more than the rounds it runs. Letters: B
images, C channels, r resolution.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL.Image import Image
from torch import Tensor

from progresvit import checkpoint, compute
from progresvit.data.decode import PictureError, decode, upright_rgb
from progresvit.data.preprocess import evaluation_transform, normalise, preprocessing_hash
from progresvit.engine.fold import fold
from progresvit.engine.prediction import Prediction
from progresvit.model import ProgResViT
from progresvit.model.precision import autocast
from progresvit.routing import Abstention, Policy, Router, Setting, SettingWarning, load_router, load_setting
from progresvit.routing.router import router_hash

PathLike = str | os.PathLike[str]
Threshold = float | Sequence[float] | Setting | PathLike


class Engine:
    """Classifies pictures in rounds. The model is folded when the engine is made; later changes of it do not count.

    ``threshold`` is a number, one for each round but the last, or what ``progresvit calibrate`` wrote (a ``Setting`` or
    its path); a setting made for other weights, preprocessing or precision warns. It is compared with top-10 entropies,
    or with the probabilities of ``router``. ``abstain`` is an entropy from which on answers are withheld, or an
    ``Abstention``. ``temperatures`` divide the logits of each round for the reported probability alone; routing does
    not see them.
    """

    def __init__(
        self,
        model: ProgResViT,
        threshold: Threshold,
        *,
        router: Router | PathLike | None = None,
        abstain: float | Abstention | None = None,
        temperatures: Sequence[float] | None = None,
        device: str | torch.device | None = None,
        precision: str = "fp32",
        batch: int = 64,
    ) -> None:
        if batch < 1:
            raise ValueError(f"a batch holds one image at least, not {batch}.")
        self.device = torch.device(device) if device is not None else next(model.parameters()).device
        self.precision, self.batch = precision, batch
        autocast(self.device, precision)
        self.config = config = model.config
        self.rounds = fold(model).to(self.device)
        rounds = len(config.rounds)
        router = load_router(os.fspath(router)) if isinstance(router, str | os.PathLike) else router
        threshold = load_setting(os.fspath(threshold)) if isinstance(threshold, str | os.PathLike) else threshold
        if isinstance(threshold, Setting):
            self._check(threshold, router, model)
            threshold = threshold.threshold
        self.policy = Policy.make(rounds, threshold, router=router, abstain=abstain)
        for one in (self.policy.router, self.policy.abstention.router):
            if one is not None:
                self._check_router(one, model)
                one.to(self.device)
        self.temperatures = tuple(temperatures) if temperatures is not None else (1.0,) * rounds
        if len(self.temperatures) != rounds or not all(t > 0 and math.isfinite(t) for t in self.temperatures):
            raise ValueError(f"temperatures are {rounds} numbers above 0, one for each round, not {temperatures}.")
        self.gmacs = compute.cumulative_gmacs(config)
        self._transform = evaluation_transform(config, as_bytes=True)

    def classify(self, images: Tensor | Sequence[Image | PathLike]) -> list[Prediction]:
        """A prediction for each picture, in order.

        Pictures are paths or PIL images, which are cropped as in evaluation, or a uint8 tensor (B, C, r, r) of square
        images, which are taken as they are; r is the resolution of the last round or more.
        """
        if isinstance(images, str | os.PathLike | Image):
            raise ValueError("classify takes a list of pictures; put this one into brackets: classify([picture]).")
        predictions: list[Prediction] = []
        for first in range(0, len(images), self.batch):
            some = images[first : first + self.batch]
            pixels = self._checked(some) if isinstance(some, Tensor) else torch.stack([self._open(one) for one in some])
            predictions += self._classify(pixels.to(self.device))
        return predictions

    @torch.inference_mode()
    def _classify(self, pixels: Tensor) -> list[Prediction]:
        images = normalise(pixels, self.config)  # (B, C, r, r)
        numbers = torch.arange(len(images), device=self.device)
        found: dict[int, Prediction] = {}
        tokens = None
        for s in range(len(self.gmacs)):
            with autocast(self.device, self.precision):
                output = self.rounds[s](images, tokens)
            decision = self.policy.decide(s, output.logits)
            answers = _answers(output.logits[decision.leaves].float() / self.temperatures[s])
            facts = (
                numbers[decision.leaves],
                *answers,
                decision.entropy[decision.leaves],
                decision.abstains[decision.leaves],
            )
            for number, index, probability, entropy, abstained in zip(*(fact.tolist() for fact in facts)):
                found[number] = Prediction(
                    index=index,
                    label=self.config.labels[index] if self.config.labels and index >= 0 else None,
                    probability=probability,
                    exit_round=s + 1,
                    entropy=entropy,
                    gmacs=self.gmacs[s],
                    abstained=abstained,
                )
            stays = ~decision.leaves
            if not bool(stays.any()):
                break
            images, numbers, tokens = images[stays], numbers[stays], output.tokens[stays]
        return [found[number] for number in range(len(pixels))]

    def _open(self, picture: Image | PathLike) -> Tensor:
        if isinstance(picture, str | os.PathLike):
            path = Path(picture)
            try:
                return self._transform(decode(path.read_bytes()))
            except PictureError as error:
                raise ValueError(f"{path}: {error}.") from error
        return self._transform(upright_rgb(picture))

    def _checked(self, images: Tensor) -> Tensor:
        least, channels = self.config.resolution, self.config.in_channels
        square = images.ndim == 4 and images.shape[1] == channels and images.shape[2] == images.shape[3] >= least
        if images.dtype != torch.uint8 or not square:
            raise ValueError(
                f"a tensor of images is uint8 of shape (B, {channels}, r, r), r at least {least}, not {images.dtype} "
                f"of shape {tuple(images.shape)}; pass paths or PIL images to have them cropped."
            )
        return images

    def _check(self, setting: Setting, router: Router | None, model: ProgResViT) -> None:
        setting.check_use(len(self.config.rounds), None if router is None else router_hash(router))
        caveat = setting.caveat(
            weights=checkpoint.weights_hash(model),
            preprocessing=preprocessing_hash(self.config),
            precision=self.precision,
        )
        if caveat is not None:
            warnings.warn(caveat, SettingWarning, stacklevel=3)

    def _check_router(self, router: Router, model: ProgResViT) -> None:
        if router.origin.model is not None and router.origin.model != checkpoint.weights_hash(model):
            warnings.warn("the router was fitted on another model's records.", SettingWarning, stacklevel=3)


def _answers(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest class and its probability: (B, K) -> (B,) twice; -1 and NaN where logits are not finite."""
    values = logits.float()
    probability, index = values.softmax(dim=-1).max(dim=-1)
    finite = values.isfinite().all(dim=-1)
    return index.where(finite, -1), probability.where(finite, torch.nan)
