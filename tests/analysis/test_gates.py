"""PSG's multipliers: heat map, distributions and change over depth, against gates computed module by module."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from progresvit.analysis.gate_depth import gate_depth, gate_depth_figure, gate_depth_table, static_share
from progresvit.analysis.gate_distributions import (
    gate_distributions,
    gate_distributions_figure,
    gate_distributions_table,
)
from progresvit.analysis.gates import BRANCHES, RoundMultipliers, deviation_norm, gates_figure, gates_table, round_gates
from progresvit.config import ModelConfig, make_rounds
from progresvit.model import ProgResViT, registry
from progresvit.model.psg import stage_metadata
from tests.analysis.made import assert_on_page, rows_of

ALL = [round_gates, gate_distributions, gate_depth]


@pytest.fixture
def make(randomize):
    """A random model with these heads in its rounds; ``spare`` heads of the backbone run in none."""

    def build(*heads, spare=0, **fields):
        resolutions = [16 * (s + 1) for s in range(len(heads))]
        config = ModelConfig(
            rounds=make_rounds(resolutions, heads),
            heads=heads[-1] + spare,
            **{"depth": 4, "patch_size": 8, "num_classes": 5, **fields},
        )
        return randomize(ProgResViT(config))

    return build


def gate_by_hand(gate, metadata, encoder):
    condition = F.silu(encoder(metadata))
    return 1 + gate.delta(F.silu(gate.hidden(condition)))


@torch.no_grad()
def multipliers_by_hand(model):
    """Multipliers of the blocks (D, 3, d) and of the transition (2, d), round after round."""
    psg, config = model.psg, model.config
    stages = stage_metadata([round_.resolution for round_ in config.rounds], config.depth)
    for s, round_ in enumerate(config.rounds):
        rows = []
        for own, metadata in zip(psg.blocks, stages[0 if config.psg == "static" else s]):
            attn, mlp, out = (
                gate_by_hand(gate, metadata, psg.encoder) for gate in (own.attn_gate, own.mlp_gate, own.out_gate)
            )
            vectors = (attn * own.attn_scale, mlp * own.mlp_scale, out)
            rows.append([vector[: round_.width].numpy() for vector in vectors])
        metadata = stages[0 if config.psg == "static" else s][0]
        gates = (psg.fusions[s - 1].image_gate, psg.fusions[s - 1].previous_gate) if s else ()
        yield np.array(rows), np.array([gate_by_hand(gate, metadata, psg.encoder).numpy() for gate in gates])


def images_of(figure):
    return [image for axes in figure.axes for image in axes.images]


@pytest.mark.parametrize("psg", [True, "static"])
def test_multipliers_equal_the_gate_modules(make, psg):
    model = make(1, 2, 3, psg=psg)
    rounds = round_gates(model)
    assert [round_.blocks.shape for round_ in rounds] == [(4, 3, 64), (4, 3, 128), (4, 3, 192)]
    assert [round_.resolution for round_ in rounds] == [16, 32, 48]
    for s, (round_, (blocks, fusion)) in enumerate(zip(rounds, multipliers_by_hand(model))):
        assert round_.blocks.dtype == np.float32
        assert round_.blocks == pytest.approx(blocks, abs=1e-5)
        if s == 0:
            assert round_.fusion is None
        else:
            assert round_.fusion == pytest.approx(fusion, abs=1e-5)


def test_a_fresh_model_has_multipliers_of_exactly_one(small_config):
    model = ProgResViT(small_config)
    first, second = round_gates(model)
    assert (first.blocks == 1).all()
    assert (second.blocks == 1).all()
    assert (second.fusion == 1).all()
    first_depth, last_depth = gate_depth(model)
    assert (first_depth.mean == 1).all()
    for zero in (first_depth.std, first_depth.rms_from_one, first_depth.to_next.rms_difference):
        assert (zero == 0).all()
    assert last_depth.to_next is None
    assert static_share([first_depth, last_depth]) == (dict.fromkeys(BRANCHES),)
    assert all(panel.separations == (0.0,) for panel in gate_distributions(model))
    (colour,) = {
        tuple(image.cmap(image.norm(image.get_array())).reshape(-1, 4)[0])
        for image in images_of(gates_figure([first, second]))
    }
    assert min(colour) > 0.95  # white
    below = gate_depth_figure([first_depth, last_depth]).axes[3]
    assert below.get_ylim()[0] == 0
    assert below.get_yscale() == "symlog"  # zeros have a place


def test_gates_of_a_model_in_lower_precision_are_float32(small_model):
    expected = round_gates(small_model)[1].blocks
    result = round_gates(small_model.bfloat16())[1].blocks
    assert result.dtype == np.float32
    assert result == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("analysis", ALL)
def test_models_without_psg_are_refused(small_config, analysis):
    with pytest.raises(ValueError, match=r"none \(psg is off\); give a model with PSG, such as imagenet-tiny"):
        analysis(ProgResViT(small_config.replace(psg=False)))
    rounds = [{"resolution": 32, "heads": 1}, {"resolution": 32, "heads": 2}]
    config = registry.config_class("thinkingvit")(heads=2, rounds=rounds, depth=2, patch_size=8, num_classes=5)
    with pytest.raises(ValueError, match=r"none \(kind 'thinkingvit'\); give a model with PSG"):
        analysis(registry.build(config))


def test_the_table_of_gates_has_every_multiplier_counted_from_one(make):
    rounds = round_gates(make(1, 2))
    rows = rows_of(gates_table(rounds))
    assert list(rows[0]) == ["round", "branch", "block", "channel", "multiplier"]
    assert len(rows) == 4 * 3 * 64 + 4 * 3 * 128 + 2 * 128
    assert len({tuple(row.values())[:4] for row in rows}) == len(rows)
    for row in rows:
        round_, channel = rounds[int(row["round"]) - 1], int(row["channel"]) - 1
        if row["branch"].startswith("fusion"):
            assert row["block"] == ""
            expected = round_.fusion[["fusion image", "fusion previous"].index(row["branch"]), channel]
        else:
            expected = round_.blocks[int(row["block"]) - 1, BRANCHES.index(row["branch"]), channel]
        assert np.float32(row["multiplier"]) == expected


def test_the_heat_map_shows_every_multiplier_in_one_colour_scale_around_one(make):
    rounds = round_gates(make(1, 2, 3))
    images = images_of(gates_figure(rounds))
    expected = []
    for round_ in rounds:
        expected += [] if round_.fusion is None else [round_.fusion]
        expected += [round_.blocks[:, place] for place in range(3)]
    assert len(images) == 3 * 3 + 2
    for image, values in zip(images, expected):
        assert np.array_equal(image.get_array(), values)
        assert image.get_extent() == [0.5, values.shape[1] + 0.5, len(values) + 0.5, 0.5]
    (norm,) = {image.norm for image in images}
    assert norm(1) == pytest.approx(0.5)
    assert norm.vmax - 1 == pytest.approx(1 - norm.vmin)
    deviation = np.abs(np.concatenate([values.ravel() for values in expected]) - 1)
    assert norm.vmax - 1 == pytest.approx(np.percentile(deviation, 99.5))
    assert norm(1 + 0.01) - 0.5 == pytest.approx(0.5 - norm(1 - 0.01))
    assert {image.cmap.name for image in images} == {"RdBu_r"}


def test_the_colour_scale_spreads_small_deviations_beside_a_large_one():
    blocks = np.full((12, 3, 64), 1.02, np.float32)
    blocks[-1] = 5
    norm = deviation_norm([RoundMultipliers(blocks=blocks, fusion=None, resolution=16, width=64)])
    assert norm.vmax == pytest.approx(5)
    assert 0.55 < norm(1.02) < 0.75  # 0.5025 on a linear scale


def test_ticks_of_the_colour_scale_are_multipliers_around_one(make):
    bar = gates_figure(round_gates(make(1, 2))).axes[-1]
    labels = [float(label.get_text().replace("−", "-")) for label in bar.get_xticklabels()]
    assert 1 in labels
    assert labels == pytest.approx(sorted(2 - label for label in labels))
    assert labels == pytest.approx(bar.get_xticks(), rel=1e-3)
    assert "99.5th percentile" in bar.get_xlabel()


def test_inactive_channels_are_grey_and_labelled(make):
    figure = gates_figure(round_gates(make(1, 2, spare=1)))
    by_title = {axes.get_title(): axes for axes in figure.axes}
    first, second = by_title["round 1: MLP"], by_title["round 2: MLP"]
    strip = by_title["transition from round 1 to 2: fusion gates"]
    for panel, active in ((first, 64), (second, 128), (strip, 128)):
        assert panel.get_xlim() == (0.5, 192.5)
        assert panel.images[0].get_extent()[1] == active + 0.5
        assert panel.get_facecolor()[:3] == pytest.approx((0.82,) * 3)
        (text,) = panel.texts
        assert text.get_text() == "inactive"
        assert active < text.get_position()[0] < 193
    full = gates_figure(round_gates(make(2, 2)))
    assert not any(axes.texts for axes in full.axes)


@pytest.mark.parametrize(
    ("analysis", "draw"),
    [(round_gates, gates_figure), (gate_distributions, gate_distributions_figure), (gate_depth, gate_depth_figure)],
)
def test_nothing_of_a_figure_is_cut_off(make, analysis, draw):
    figure = draw(analysis(make(1, 2, 3)))
    figure.draw_without_rendering()
    legends = [legend for part in (figure, *figure.subfigs) for legend in part.legends]
    assert_on_page(figure, [artist.get_tightbbox() for artist in (*figure.axes, *legends)], beyond=1)


def test_distributions_are_of_the_first_middle_and_last_block(make):
    model = make(1, 2, depth=5)
    result = gate_distributions(model)
    assert [(panel.block, panel.branch) for panel in result] == [(b, branch) for b in (1, 3, 5) for branch in BRANCHES]
    (first, _), (second, _) = multipliers_by_hand(model)
    for panel in result:
        place = BRANCHES.index(panel.branch)
        earlier, later = first[panel.block - 1, place], second[panel.block - 1, place]
        assert panel.rounds[0] == pytest.approx(earlier, abs=1e-5)
        assert panel.rounds[1] == pytest.approx(later, abs=1e-5)
        distance = sum((later[channel] - earlier[channel]) ** 2 for channel in range(64)) / 64
        assert panel.separations == pytest.approx([distance**0.5], abs=1e-5)


def test_blocks_can_be_chosen_and_appear_once_in_their_order(make):
    result = gate_distributions(make(1, 2), blocks=[4, 2, 4])
    assert [panel.block for panel in result] == [2, 2, 2, 4, 4, 4]
    assert [panel.block for panel in gate_distributions(make(1, 2, depth=1))] == [1, 1, 1]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [([1, 5], "no block 5"), ([0], "no block 0"), ([-1], "no block -1"), ([], "no block is given")],
)
def test_blocks_that_do_not_exist_are_refused_with_the_range(make, blocks, message):
    with pytest.raises(ValueError, match=f"{message}; this model has blocks 1 to 4"):
        gate_distributions(make(1, 2), blocks=blocks)


def test_the_table_of_distributions_has_a_row_for_each_round_block_and_branch(make):
    result = gate_distributions(make(1, 2, 3))
    rows = rows_of(gate_distributions_table(result))
    assert [(row["round"], row["block"], row["branch"]) for row in rows] == [
        (str(number), str(panel.block), panel.branch) for number in (1, 2, 3) for panel in result
    ]
    assert [row["channels"] for row in rows] == ["64"] * 9 + ["128"] * 9 + ["192"] * 9
    for row, values in zip(rows, [panel.rounds[number] for number in range(3) for panel in result]):
        assert float(row["mean"]) == pytest.approx(values.mean(), rel=1e-5)
        assert float(row["std"]) == pytest.approx(values.std(), rel=1e-4)
        for share in (5, 25, 50, 75, 95):
            below = (values <= float(row[f"percentile_{share}"])).mean()
            assert below == pytest.approx(share / 100, abs=0.02)
    assert [row["rms_difference_to_next_round"] == "" for row in rows] == [False] * 18 + [True] * 9
    assert float(rows[9]["rms_difference_to_next_round"]) == pytest.approx(result[0].separations[1])


def test_a_panel_of_distributions_overlays_the_rounds_and_names_their_separation(make):
    result = gate_distributions(make(1, 2, 3))
    figure = gate_distributions_figure(result)
    assert len(figure.axes) == 9
    for panel, distribution in zip(figure.axes, result):
        assert len(panel.patches) == 3
        assert len({(patch.get_hatch(), str(patch.get_linestyle())) for patch in panel.patches}) == 3
        for patch in panel.patches:  # all channels are in the bars: their heights sum to 100 %
            corners = patch.get_xy()
            heights = corners[1 : 2 * 31 + 1 : 2, 1]
            assert heights.sum() == pytest.approx(100)
        (line,) = panel.lines
        assert list(line.get_xdata()) == [1, 1]
        numbers = ", ".join(f"{separation:.3f}" for separation in distribution.separations)
        assert panel.get_title() == f"block {distribution.block}: {distribution.branch}\nΔ = {numbers}"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["round 1", "round 2", "round 3"]


def test_numbers_over_depth_equal_a_loop_over_the_channels(make):
    model = make(1, 2, 3)
    result = gate_depth(model)
    by_hand = [blocks.astype(np.float64) for blocks, _ in multipliers_by_hand(model)]
    for s, (round_, g) in enumerate(zip(result, by_hand)):
        assert round_.mean == pytest.approx(g.mean(axis=2), abs=1e-5)
        assert round_.std == pytest.approx(g.std(axis=2), abs=1e-5)
        assert round_.rms_from_one == pytest.approx(((g - 1) ** 2).mean(axis=2) ** 0.5, abs=1e-5)
        if s == 2:
            assert round_.to_next is None
            continue
        d = g.shape[2]
        later = by_hand[s + 1][:, :, :d]
        assert round_.to_next.rms_difference == pytest.approx(((later - g) ** 2).mean(axis=2) ** 0.5, abs=1e-5)
        assert round_.to_next.rms_static == pytest.approx((((later + g) / 2 - 1) ** 2).mean(axis=2) ** 0.5, abs=1e-5)


def test_static_and_changing_part_add_up_to_the_squared_deviation(make):
    model = make(1, 2, 3)
    rounds = round_gates(model)
    shares = static_share(gate_depth(model))
    assert len(shares) == 2
    for share, earlier, later in zip(shares, rounds, rounds[1:]):
        for place, branch in enumerate(BRANCHES):
            g1 = earlier.blocks[:, place].astype(np.float64)
            g2 = later.blocks[:, place, : earlier.channels].astype(np.float64)
            total = ((g1 - 1) ** 2 + (g2 - 1) ** 2).sum()
            changing = ((g2 - g1) ** 2).sum() / 2
            assert share[branch] == pytest.approx(1 - changing / total, rel=1e-4)
            assert 0 < share[branch] < 1


def test_static_gates_do_not_differ_between_rounds(make):
    model = make(1, 2, psg="static")
    result = gate_depth(model)
    assert (result[0].to_next.rms_difference == 0).all()
    assert (result[0].to_next.rms_static > 0).all()
    assert static_share(result) == (dict.fromkeys(BRANCHES, 1.0),)
    assert all(panel.separations == (0.0,) for panel in gate_distributions(model))


def test_gates_that_mirror_each_other_have_no_static_part(make, monkeypatch):
    deviation = np.random.default_rng(0).normal(size=(4, 3, 64)).astype(np.float32)
    rounds = [RoundMultipliers(blocks=1 + sign * deviation, fusion=None, resolution=16, width=64) for sign in (1, -1)]
    monkeypatch.setattr("progresvit.analysis.gate_depth.round_gates", lambda model: rounds)
    result = gate_depth(None)
    assert static_share(result)[0] == pytest.approx(dict.fromkeys(BRANCHES, 0), abs=1e-9)
    assert result[0].to_next.rms_difference == pytest.approx(2 * result[0].rms_from_one, rel=1e-5)


def test_the_table_over_depth_has_a_row_for_each_round_block_and_branch(make):
    result = gate_depth(make(1, 2))
    rows = rows_of(gate_depth_table(result))
    assert len(rows) == 2 * 4 * 3
    for row in rows:
        round_, at = result[int(row["round"]) - 1], (int(row["block"]) - 1, BRANCHES.index(row["branch"]))
        assert float(row["mean"]) == round_.mean[at]
        assert float(row["std"]) == round_.std[at]
        assert float(row["rms_from_one"]) == round_.rms_from_one[at]
        compared = [row[key] for key in ("rms_difference_to_next_round", "rms_static", "static_share")]
        if round_.to_next is None:
            assert compared == ["", "", ""]
        else:
            m, d = round_.to_next.rms_static[at], round_.to_next.rms_difference[at]
            assert [float(value) for value in compared] == pytest.approx([d, m, m**2 / (m**2 + d**2 / 4)])


def test_the_figure_over_depth_has_a_line_for_each_round_and_two_for_each_transition(make):
    result = gate_depth(make(1, 2, 3))
    figure = gate_depth_figure(result)
    above, below = figure.axes[:3], figure.axes[3:]
    for place, (upper, lower) in enumerate(zip(above, below)):
        drawn = [line.get_ydata() for line in upper.lines if line.get_marker() != "None"]
        assert np.array_equal(drawn, [round_.mean[:, place] for round_ in result])
        assert len(upper.collections) == 3  # the bands
        expected = [
            values[:, place]
            for round_ in result[:2]
            for values in (round_.to_next.rms_difference, round_.to_next.rms_static)
        ]
        assert np.array_equal([line.get_ydata() for line in lower.lines], expected)
        assert len({line.get_marker() for line in lower.lines}) == 4
        assert 4 in lower.get_xticks()
        shares = ", ".join(f"{100 * share[BRANCHES[place]]:.0f}" for share in static_share(result))
        assert lower.get_title() == f"{BRANCHES[place]}\nstatic share {shares} %"


def test_a_model_of_one_round_has_no_differences(make):
    model = make(2)
    (round_,) = round_gates(model)
    assert round_.fusion is None
    assert len(images_of(gates_figure([round_]))) == 3
    result = gate_distributions(model)
    assert all(panel.separations == () for panel in result)
    assert "Δ" not in gate_distributions_figure(result).axes[0].get_title()
    assert static_share(gate_depth(model)) == ()
    assert len(gate_depth_figure(gate_depth(model)).axes) == 3
    assert {row["static_share"] for row in rows_of(gate_depth_table(gate_depth(model)))} == {""}


def test_titles_of_gates_hold_what_the_tables_hold(make):
    model = make(1, 2)
    rounds, depth, result = round_gates(model), gate_depth(model), gate_distributions(model)
    means = np.stack([round_.blocks.mean(axis=-1) for round_ in rounds])  # (S, D, 3)
    s, block, branch = np.unravel_index(np.abs(means - 1).argmax(), means.shape)
    title = " ".join(gates_figure(rounds).get_suptitle().split())
    assert f"in block {block + 1}, {BRANCHES[branch]}: " in title
    assert f"{means[s, block, branch]:.2f} in round {s + 1}" in title
    shares = [100 * share for share in static_share(depth)[0].values()]
    figure = gate_depth_figure(depth)
    assert f"{min(shares):.0f}" in figure.get_suptitle()
    assert f"{max(shares):.0f}" in figure.get_suptitle()
    for half in figure.subfigs:
        names = [text.get_text() for text in half.legends[0].get_texts()]
        assert len(set(names)) == len(names)
        assert not any(": " in name for name in names)
    most = max(result, key=lambda panel: panel.separations[0])
    title = " ".join(gate_distributions_figure(result).get_suptitle().split())
    assert title.endswith(f"Δ = {most.separations[0]:.3f} in block {most.block}, {most.branch}")
