"""Every figure of the method: parameters exact, GMACs to three decimals, and both against the real module."""

import pytest
import timm
import torch
from hypothesis import given, settings
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from progresvit import compute
from progresvit.config import PRESETS, ModelConfig, make_rounds, plain_vit, preset
from progresvit.model import ProgResViT
from tests.test_config import configs

SMALL = preset("progresvit_small_192_240")


def three_decimals(values):
    return [round(value, 3) for value in values]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SMALL, 24_731_560),
        (SMALL.replace(position_resolution=224), 24_720_424),
        (preset("progresvit_small_128_192_240"), 24_947_560),
        (plain_vit(resolution=224, heads=6), 22_050_664),
    ],
)
def test_parameters(config, expected):
    assert compute.parameters(config) == expected
    assert sum(parameter.numel() for parameter in ProgResViT(config).parameters()) == expected


@settings(deadline=None, max_examples=30)
@given(configs())
def test_parameters_are_those_of_the_module(config):
    assert compute.parameters(config) == sum(parameter.numel() for parameter in ProgResViT(config).parameters())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SMALL, [0.912, 6.267]),
        (preset("progresvit_small_160_240"), [0.615, 5.971]),
        (preset("progresvit_small_160_384"), [0.615, 16.152]),
        (preset("progresvit_small_128_192_240"), [0.188, 1.735, 7.097]),
        (plain_vit(resolution=224, heads=6), [4.599]),
        (plain_vit(resolution=240, heads=6), [5.336]),
        (plain_vit(resolution=384, heads=6), [15.490]),
    ],
)
def test_cumulative_gmacs_of_the_paper(config, expected):
    assert three_decimals(compute.cumulative_gmacs(config)) == expected


def test_cumulative_gmacs_executed():
    assert three_decimals(compute.cumulative_gmacs(SMALL, convention="executed")) == [0.888, 6.241]


def test_component_table_of_the_paper():
    first, second = compute.round_macs(SMALL)
    assert (first.total, first.transition) == (first.stack, 0)
    shown = {
        "round 1": f"{first.total / 1e9:.2f}",
        "round 1 block gates": f"{first.block_gates / 1e9:.3f}",
        "projector": f"{second.projector / 1e9:.2f}",
        "fusion gates": f"{second.fusion_gates / 1e9:.4f}",
        "transition": f"{second.transition / 1e9:.2f}",
        "round 2 stack": f"{second.stack / 1e9:.2f}",
        "round 2 block gates": f"{second.block_gates / 1e9:.3f}",
        "increment": f"{second.total / 1e9:.2f}",
        "whole path": f"{(first.total + second.total) / 1e9:.2f}",
    }
    assert shown == {
        "round 1": "0.91",
        "round 1 block gates": "0.002",
        "projector": "0.02",
        "fusion gates": "0.0001",
        "transition": "0.02",
        "round 2 stack": "5.34",
        "round 2 block gates": "0.002",
        "increment": "5.36",
        "whole path": "6.27",
    }


def test_average_gmacs_at_the_continuation_rates_of_the_papers_router_table():
    averages = [compute.average_gmacs(SMALL, [1 - rate / 10, rate / 10]) for rate in range(11)]
    assert three_decimals(averages) == [0.912, 1.447, 1.983, 2.518, 3.054, 3.590, 4.125, 4.661, 5.196, 5.732, 6.267]


def test_average_gmacs_of_the_papers_three_round_table():
    config = preset("progresvit_small_128_192_240")
    # The paper prints the shares in percent with one decimal, which leaves 0.01 GMACs open.
    assert compute.average_gmacs(config, [0.346, 0.393, 0.261]) == pytest.approx(2.597, abs=0.01)


def test_merging_tokens_by_hand():
    """DeiT-S with r = 13. ToMe publishes 2.7 GMACs for it; here it is 2.706, matching products included."""
    macs = compute.round_macs(plain_vit(resolution=224, heads=6).with_merge([13]))[0]
    tokens = [197 - 13 * block for block in range(12)]  # 197, 184, ... 54
    assert macs.attention_projections == sum(4 * count * 384 * 384 for count in tokens)
    assert macs.attention_products == sum(2 * count * count * 384 for count in tokens)
    assert macs.mlp == sum(2 * (count - 13) * 384 * 1536 for count in tokens)
    halves = [(98, 98), (92, 91), (85, 85), (79, 78), (72, 72), (66, 65)]  # of 196, 183, ... patch tokens
    halves += [(59, 59), (53, 52), (46, 46), (40, 39), (33, 33), (27, 26)]
    assert macs.token_merging == sum(a * b * 64 for a, b in halves)
    assert three_decimals([macs.total / 1e9]) == [2.706]
    assert compute.round_macs(plain_vit(resolution=224, heads=6))[0].token_merging == 0


def count_macs(module, config):
    """torch's own count. The math backend, since the fused attention of a CPU goes uncounted."""
    image = torch.zeros(1, config.in_channels, config.resolution, config.resolution)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(image)
    flops = counter.get_total_flops()
    assert flops % 2 == 0
    return flops // 2


def expected_macs(config):
    """The module embeds only the active channels and computes its gates: one thing from each convention."""
    paper, executed = compute.round_macs(config, "paper"), compute.round_macs(config, "executed")
    return sum(e.total + p.block_gates + p.fusion_gates for p, e in zip(paper, executed))


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(configs())
def test_closed_form_equals_torchs_flop_counter(config):
    assert count_macs(ProgResViT(config).eval(), config) == expected_macs(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_closed_form_equals_torchs_flop_counter_on_the_presets(name):
    config = preset(name)
    assert count_macs(ProgResViT(config).eval(), config) == expected_macs(config)


def test_conventions_differ_only_in_embedding_and_gates():
    for paper, executed in zip(compute.round_macs(SMALL, "paper"), compute.round_macs(SMALL, "executed")):
        differing = {name for name in vars(paper) if getattr(paper, name) != getattr(executed, name)}
        assert differing <= {"patch_embedding", "block_gates", "fusion_gates"}
        assert executed.block_gates == executed.fusion_gates == 0


@pytest.mark.slow
@pytest.mark.parametrize("resolution", [224, 384])
def test_a_plain_vit_costs_what_timms_deit_costs(resolution):
    deit = timm.create_model("deit_small_patch16_224", img_size=resolution).eval()
    config = plain_vit(resolution=resolution, heads=6)
    for convention in ("paper", "executed"):
        assert count_macs(deit, config) == compute.round_macs(config, convention)[0].total


def test_unknown_convention_is_refused():
    with pytest.raises(ValueError, match="use 'paper' or 'executed'"):
        compute.round_macs(SMALL, "fvcore")


@pytest.mark.parametrize("shares", [[1.0], [0.5, 0.4], [1.5, -0.5], [float("nan"), 1.0]])
def test_exit_shares_that_are_none_are_refused(shares):
    with pytest.raises(ValueError, match=r"give one per round|sum to 1"):
        compute.average_gmacs(SMALL, shares)


def test_ablation_steps_are_three_configs_of_one_class():
    width_only = ModelConfig(rounds=make_rounds([224, 224], [3, 6]), heads=6, psg=False)
    with_resolution = ModelConfig(rounds=make_rounds([192, 240], [3, 6]), heads=6, psg=False)
    full = ModelConfig(rounds=make_rounds([192, 240], [3, 6]), heads=6)
    gates = compute.parameters(full) - compute.parameters(with_resolution)
    assert gates == sum(p.numel() for p in ProgResViT(full).psg.parameters())
    assert compute.round_macs(width_only)[1].projector > 0  # the projector stays at equal resolutions
