"""Attention maps: softmax(q kᵀ / 8) of the class token in the last block of every round, and their figure."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from progresvit.analysis.attention import RoundAttention, attention_figure, attention_maps, attention_table
from progresvit.config import plain_vit
from progresvit.data.crop import crop
from progresvit.data.transforms import evaluation_transform
from progresvit.model import ProgResViT
from progresvit.model.token_merging import Merging
from progresvit.plots import render
from tests.analysis.made import KINDS, SIZES, assert_apart, assert_on_page, model_of_kind, rows_of


@pytest.fixture
def image():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def literal(block, x, heads, bias=0.0):
    """Attention of the class token from the weights, head by head: tokens (N, d) -> (heads, N)."""
    d, width = x.shape[-1], block.attn.qkv.in_features
    weight, bias_of = block.attn.qkv.weight[:, :d], block.attn.qkv.bias
    x = F.layer_norm(x, (d,), block.norm1.weight[:d], block.norm1.bias[:d], block.norm1.eps)
    rows = []
    for head in range(heads):
        q_rows = slice(64 * head, 64 * (head + 1))
        k_rows = slice(width + 64 * head, width + 64 * (head + 1))
        q, k = (x @ weight[part].T + bias_of[part] for part in (q_rows, k_rows))
        rows.append((q[0] @ k.T / 8 + bias).exp())
    attention = torch.stack(rows)
    return (attention / attention.sum(dim=1, keepdim=True)).detach()


def inputs_of_the_last_block(model, image):
    """In each round of a ProgResViT with two blocks, (N, d)."""
    images, previous = evaluation_transform(model.config)(image)[None], None
    for s, round_ in enumerate(model.config.rounds):
        gates = model.gates(s)
        x = model.embed(images, resolution=round_.resolution, width=round_.width)
        x = x if previous is None else model.fuse(s, x, previous, gates.fusion)
        yield model.blocks[0](x, gates.blocks[0])[0]
        previous = model.run_round(s, images, previous).tokens


def test_maps_equal_the_softmax_that_the_weights_give(small_model, image):
    rounds = attention_maps(small_model, image)
    assert [round_.patches.shape for round_ in rounds] == [(1, 2, 2), (2, 4, 4)]
    for s, (round_, x) in enumerate(zip(rounds, inputs_of_the_last_block(small_model, image))):
        expected = literal(small_model.blocks[1], x, heads=s + 1)
        assert round_.patches.reshape(s + 1, -1) == pytest.approx(expected[:, 1:].numpy(), rel=1e-4)
        assert round_.class_token == pytest.approx(expected[:, 0].numpy(), rel=1e-4)


def test_maps_are_of_the_last_block_and_no_other(small_model, image):
    rounds = attention_maps(small_model, image)
    first = literal(small_model.blocks[0], next(inputs_of_the_last_block(small_model, image)), heads=1)
    assert np.abs(rounds[0].patches.ravel() - first[0, 1:].numpy()).max() > 1e-3
    with torch.no_grad():
        small_model.blocks[1].mlp.fc2.weight.add_(1)  # after the attention of round 1
    assert np.array_equal(attention_maps(small_model, image)[0].patches, rounds[0].patches)
    with torch.no_grad():
        small_model.blocks[1].attn.qkv.weight[64 * 2].mul_(3)  # a key of the first head
    assert not np.allclose(attention_maps(small_model, image)[0].patches, rounds[0].patches)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_shows_what_its_blocks_computed(kind, randomize, image, monkeypatch):
    model = randomize(model_of_kind(kind))
    calls, real = [], F.scaled_dot_product_attention

    def recorded(q, k, v, attn_mask=None):
        assert attn_mask is None
        calls.append((q @ k.mT / 8).softmax(dim=-1)[0, :, 0])  # of the class token, (h, N)
        return real(q, k, v)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    rounds = attention_maps(model, image)
    last = {"early_exit": [0, 1]}.get(kind, [1, 3])  # of two blocks in each round; early exits go on with the second
    for round_, settings, expected in zip(rounds, model.config.rounds, [calls[number] for number in last]):
        assert round_.active_heads == len(expected)
        assert round_.resolution == settings.resolution
        assert round_.patches.reshape(len(expected), -1) == pytest.approx(expected[:, 1:].numpy(), rel=1e-4)
    assert len(rounds) == 2
    assert [round_.active_heads for round_ in rounds] == ([2, 2] if kind in ("matformer", "early_exit") else [1, 2])


def test_patches_of_a_merged_token_share_its_attention_equally(small_config, randomize, image):
    model = randomize(ProgResViT(small_config.with_merge([0, 5])))
    images = evaluation_transform(model.config)(image)[None]
    first = model.run_round(0, images)
    gates = model.gates(1)
    x = model.fuse(1, model.embed(images, resolution=32, width=128), first.tokens, gates.fusion)
    x, merging = model.blocks[0](x, gates.blocks[0], merging=Merging.start(x, 5))
    assert x.shape[1] == 12
    of_tokens = literal(model.blocks[1], x[0], heads=2, bias=merging.size[0].log())
    expected = (of_tokens / merging.size)[:, 1 + merging.place[0]]
    patches = attention_maps(model, image)[1].patches
    assert patches.reshape(2, -1) == pytest.approx(expected.numpy(), rel=1e-4)
    assert of_tokens[:, 0].numpy() + patches.sum(axis=(1, 2)) == pytest.approx(1, abs=1e-6)


def test_the_image_is_the_evaluation_crop_at_the_resolution_of_the_round(small_model, image):
    coarse, fine = (round_.image for round_ in attention_maps(small_model, image))
    pixels = crop(image, small_model.config).transpose(1, 2, 0) / 255
    assert fine == pytest.approx(pixels, abs=1e-5)
    assert coarse.shape == (16, 16, 3)
    assert coarse.mean() == pytest.approx(pixels.mean(), abs=0.02)


def test_grey_models_see_a_grey_image(image):
    model = ProgResViT(plain_vit(resolution=32, heads=1, in_channels=1, mean=(0.5,), std=(0.5,), **SIZES))
    (round_,) = attention_maps(model, image)
    assert round_.image.shape == (32, 32, 1)
    assert round_.image == pytest.approx(crop(image.convert("L"), model.config).transpose(1, 2, 0) / 255, abs=1e-5)
    assert render(attention_figure([round_]), ".png").startswith(b"\x89PNG")


def test_models_of_more_channels_than_an_image_are_refused(image):
    model = ProgResViT(plain_vit(resolution=32, heads=1, in_channels=4, mean=(0.5,) * 4, std=(0.5,) * 4, **SIZES))
    with pytest.raises(ValueError, match="1 or 3 channels, and this model takes 4"):
        attention_maps(model, image)


def test_the_table_has_every_value_counted_from_one(small_model, image):
    rounds = attention_maps(small_model, image)
    rows = rows_of(attention_table(rounds))
    assert list(rows[0]) == ["round", "head", "row", "column", "attention"]
    assert len(rows) == 1 * 4 + 2 * 16
    for row in rows:
        number, head, y, x = (int(row[key]) - 1 for key in ("round", "head", "row", "column"))
        assert np.float32(row["attention"]) == rounds[number].patches[head, y, x]


def made(heads, *active, grid=4):
    """Attention of rounds without a model."""
    rng = np.random.default_rng(0)
    return [
        RoundAttention(
            patches=rng.dirichlet(np.ones(grid**2 + 1), h)[:, 1:].reshape(h, grid, grid).astype(np.float32),
            class_token=np.zeros(h, np.float32),
            heads=heads,
            image=rng.random((16 * (s + 1), 16 * (s + 1), 3)).astype(np.float32),
        )
        for s, h in enumerate(active)
    ]


def panels_of(figure, rounds):
    """Panels by title, for each round; the colour scales, which have no title, divide the rounds."""
    panels = [{}]
    for axes in figure.axes:
        if axes.get_title():
            panels[-1][axes.get_title()] = axes
        else:
            panels.append({})
    assert panels.pop() == {}
    assert len(panels) == rounds
    return panels


def test_a_row_of_the_figure_shows_the_image_and_every_head():
    rounds = made(3, 2, 3)
    figure = attention_figure(rounds)
    for panels, round_ in zip(panels_of(figure, 2), rounds):
        assert list(panels) == ["image", "head 1", "head 2", "head 3"]
        assert np.array_equal(panels["image"].images[0].get_array(), round_.image)
        limits = set()
        for head in range(round_.active_heads):
            (shown,) = panels[f"head {head + 1}"].images
            assert np.array_equal(shown.get_array(), round_.patches[head])
            assert shown.get_interpolation() == "nearest"
            assert shown.get_extent() == panels["image"].images[0].get_extent()
            limits.add(shown.get_clim())
        assert limits == {(0, float(round_.patches.max()))}
    texts = [text.get_text() for text in figure.texts]
    assert "round 1: 16 × 16 pixels, 4 × 4 patches, active heads: 2 of 3" in texts
    assert "round 2: 32 × 32 pixels, 4 × 4 patches, active heads: 3 of 3" in texts
    assert "share" in texts[-1]


def test_inactive_heads_are_marked_and_others_are_not():
    first, second = panels_of(attention_figure(made(6, 3, 6)), 2)
    marked = [title for title, panel in first.items() if [text.get_text() for text in panel.texts] == ["inactive"]]
    assert marked == ["head 4", "head 5", "head 6"]
    assert all(not first[title].images for title in marked)
    assert all(first[title].get_facecolor()[:3] == pytest.approx((0.88,) * 3) for title in marked)
    assert all(not panel.texts and panel.images for panel in second.values())


@pytest.mark.parametrize(("heads", "lines"), [(1, 1), (3, 1), (6, 1), (8, 2), (12, 2)])
def test_nothing_is_cut_off_or_drawn_over_another_panel(heads, lines):
    figure = attention_figure(made(heads, max(1, heads // 2), heads))
    boxes = [artist.get_tightbbox() for artist in figure.axes] + [text.get_window_extent() for text in figure.texts]
    assert_on_page(figure, boxes)
    assert_apart(boxes, overlap=1)
    (panels, _) = panels_of(figure, 2)
    tops = [round(panels[f"head {head + 1}"].get_position().y1, 6) for head in range(heads)]
    assert len(set(tops)) == lines
    assert tops == sorted(tops, reverse=True)
    assert math.isclose(panels["head 1"].bbox.width, panels["head 1"].bbox.height, rel_tol=1e-6)


def test_a_model_of_one_round_has_one_row(image):
    rounds = attention_maps(ProgResViT(plain_vit(resolution=32, heads=1, **SIZES)).eval(), image)
    (panels,) = panels_of(attention_figure(rounds), 1)
    assert list(panels) == ["image", "head 1"]
