"""Random erasing after mixing: a step against a literal reference."""

import copy
import math

import numpy as np
import pytest
import torch
from timm.data.mixup import cutmix_bbox_and_lam

from progresvit.data.augment.classification import Batch
from progresvit.data.sampler import Draw, seed_all
from tests.training.runs import ready, recipe, take_steps

STEP = 0


def mixed_by_hand(batch, mixing, classes):
    """timm's Mixup in its mode batch, with its draws in their order: mix or not, the share, the box of cutmix."""
    images, share = batch.images.clone(), 1.0
    if np.random.rand() < mixing.probability:
        is_cutmix, alpha = mixing.cutmix > 0, mixing.cutmix or mixing.mixup
        share = np.random.beta(alpha, alpha)
        other = batch.images.flip(0)
        if is_cutmix:
            (top, bottom, left, right), share = cutmix_bbox_and_lam(images.shape, share)
            images[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
        else:
            images = images * share + other * (1 - share)
    off = mixing.smoothing / classes
    smooth = torch.eye(classes)[batch.targets] * (1 - mixing.smoothing) + off
    return images, smooth * share + smooth.flip(0) * (1 - share)


def erased_by_hand(images, probability):
    """Zhong et al. 2020, image by image, as timm's RandomErasing in the mode pixel."""
    images, side = images.clone(), images.shape[-1]
    generator = torch.Generator().manual_seed(int(torch.randint(2**32, ())))
    draws = [torch.rand(len(images), 10, generator=generator) for _ in range(2)]
    draws += [torch.rand(len(images), generator=generator) for _ in range(3)]
    noise, erased = torch.randn(images.shape, generator=generator), 0
    for number, (areas, aspects, chance, down, right) in enumerate(zip(*draws)):
        if chance >= probability:
            continue
        for area, aspect in zip(areas.tolist(), aspects.tolist()):
            pixels = (0.02 + area * (1 / 3 - 0.02)) * side * side
            ratio = math.exp(math.log(0.3) + aspect * (math.log(1 / 0.3) - math.log(0.3)))
            height, width = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
            if height < side and width < side:
                top, left = int(down * (side - height + 1)), int(right * (side - width + 1))
                box = (number, slice(None), slice(top, top + height), slice(left, left + width))
                images[box] = noise[box]
                erased += 1
                break
    return images, erased


@pytest.mark.parametrize("mixing", [{"cutmix": 0.0}, {"mixup": 0.0}], ids=["mixup", "cutmix"])
def test_a_step_erases_after_mixing_as_a_literal_reference_does(digits, mixing):
    run = ready(recipe(model={"drop_path": 0.0}, augment={"erasing": 0.5}, mixing=mixing), digits)
    model = copy.deepcopy(run.model)
    ((batch,),) = run.data.train.steps(STEP, STEP + 1)
    batch = Batch(batch.images.clone(), batch.targets)  # mixup writes into its batch
    seed_all(Draw.STEP, run.recipe.seed, STEP, 0)
    images, labels = mixed_by_hand(batch, run.recipe.mixing, run.model.config.num_classes)
    images, erased = erased_by_hand(images, 0.5)
    assert 0 < erased < len(images)
    seed_all(Draw.STEP, run.recipe.seed, STEP, 0)
    prepared = run.task.prepare(Batch(batch.images.clone(), batch.targets))
    assert torch.allclose(prepared.images, images, atol=1e-6)
    assert torch.allclose(prepared.targets, labels, atol=1e-6)
    take_steps(run, 1)
    expected = [-(labels * output.logits.log_softmax(dim=-1)).sum(dim=-1).mean() for output in model(images)]
    assert run.step.sums.tolist() == pytest.approx([loss.item() for loss in expected], abs=1e-5)


def test_erasing_before_mixing_leaves_the_mixed_batch_alone(digits):
    early = ready(recipe(augment={"erasing": 1.0, "erase_before_mixing": True}), digits)
    never = ready(recipe(augment={"erasing": 0.0}), digits)
    ((batch,),) = early.data.train.steps(STEP, STEP + 1)
    mixed = []
    for run in (early, never):
        seed_all(Draw.STEP, run.recipe.seed, STEP, 0)
        mixed.append(run.task.prepare(Batch(batch.images.clone(), batch.targets)).images)
    assert torch.equal(*mixed)
