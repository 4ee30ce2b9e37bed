"""MACs of segmentation models: by hand, and against torch's own count."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from progresvit import compute
from progresvit.baselines.thinkingvit import ThinkingViT, ThinkingViTConfig
from progresvit.config import ModelConfig, make_rounds
from progresvit.model import ProgResViT
from tests.evaluation.made_segmentation import config
from tests.test_compute import count_macs, expected_macs

ADE = {"num_classes": 150, "task": "segmentation", "heads": 6}
PAPER = ModelConfig(rounds=make_rounds([448, 576], [3, 6]), **ADE)
"""The paper's segmentation model."""


def count_without_numbers(model, config):
    """As :func:`count_macs`, with tensors that have a shape and no values."""
    image = torch.zeros(1, 3, config.input_side, config.input_side, device="meta")
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(image)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_closed_form_equals_torchs_flop_counter(rounds):
    small = config(rounds)
    assert count_macs(ProgResViT(small).eval(), small) == expected_macs(small)


def test_closed_form_equals_torchs_flop_counter_on_the_papers_model():
    with torch.device("meta"):
        model = ProgResViT(PAPER).eval()
    assert count_without_numbers(model, PAPER) == expected_macs(PAPER)


@pytest.mark.parametrize(("resolution", "patch_size", "classes"), [(32, 16, 3), (448, 16, 150)])
def test_thinkingvit_decodes_every_patch_too(resolution, patch_size, classes):
    known = {"heads": 6, "patch_size": patch_size, "num_classes": classes, "depth": 3}
    rounds = make_rounds([resolution, resolution], [3, 6])
    segments = ThinkingViTConfig(rounds=rounds, task="segmentation", **known)
    classifies = ThinkingViTConfig(rounds=rounds, **known)
    with torch.device("meta"):
        model, other = ThinkingViT(segments).eval(), ThinkingViT(classifies).eval()
    assert round(1e9 * model.gmacs("executed")[-1]) == count_without_numbers(model, segments)
    patches = (resolution // patch_size) ** 2
    for convention in compute.CONVENTIONS:
        more = [1e9 * (a - b) for a, b in zip(model.gmacs(convention), other.gmacs(convention))]
        assert more == pytest.approx([(patches - 1) * 192 * classes, (patches - 1) * (192 + 384) * classes])


def test_the_decoder_is_all_that_differs_from_classification():
    for convention in compute.CONVENTIONS:
        for macs, other, patches, width in zip(
            compute.round_macs(PAPER, convention),
            compute.round_macs(PAPER.replace(task="classification"), convention),
            (28 * 28, 36 * 36),
            (192, 384),
        ):
            assert (macs.head, other.head) == (patches * width * 150, width * 150)
            differing = {name for name in vars(macs) if getattr(macs, name) != getattr(other, name)}
            assert differing == {"head"}


def test_cumulative_gmacs_of_the_papers_segmentation_model():
    """No published figure: what the formula gives, so that a change is noticed."""
    assert [round(gmacs, 3) for gmacs in compute.cumulative_gmacs(PAPER)] == [7.263, 50.863]
    assert [round(gmacs, 3) for gmacs in compute.cumulative_gmacs(PAPER, "executed")] == [7.145, 50.743]
