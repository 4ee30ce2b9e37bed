import math

import pytest
import torch

import progresvit
from progresvit.config import ModelConfig, make_rounds
from progresvit.engine.fold import fold
from progresvit.io.weights import weights_hash
from progresvit.model import ProgResViT
from progresvit.model.psg import stage_metadata


def test_metadata_is_that_of_the_paper():
    metadata = stage_metadata([192, 240], depth=12)
    assert metadata.shape == (2, 12, 5)
    first = [0, 5 / 23, math.log2(192 / 224), math.log2(192 / 224), 0]
    second = [1, (12 + 3) / 23, math.log2(240 / 224), math.log2(192 / 224), math.log2(240 / 192)]
    assert torch.allclose(metadata[0, 5], torch.tensor(first))
    assert torch.allclose(metadata[1, 3], torch.tensor(second))


def test_metadata_of_a_single_block_does_not_divide_by_zero():
    assert stage_metadata([224], depth=1).tolist() == [[[0.0, 0.0, 0.0, 0.0, 0.0]]]


def test_every_gate_starts_at_one():
    config = ModelConfig(rounds=make_rounds([128, 192, 240], [2, 4, 6]), heads=6, depth=2)
    model = ProgResViT(config)
    for s, round_ in enumerate(config.rounds):
        gates = model.gates(s)
        vectors = [vector for block in gates.blocks for vector in block] + (list(gates.fusion) if s else [])
        assert all(torch.equal(vector, torch.ones(round_.width)) for vector in vectors)


def test_hidden_layers_start_as_the_authors_released_them():
    torch.manual_seed(0)
    psg = ProgResViT(ModelConfig(rounds=make_rounds([192, 240], [3, 6]), heads=6, depth=4)).psg
    for gate in (gate for block in psg.blocks for gate in (block.attn_gate, block.mlp_gate, block.out_gate)):
        assert gate.hidden.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert not gate.hidden.bias.any()
    of_torch = 1 / math.sqrt(3 * 128)  # deviation of torch's default, uniform in ±1/√inputs
    for gate in (psg.fusions[0].image_gate, psg.fusions[0].previous_gate):
        assert gate.hidden.weight.std().item() == pytest.approx(of_torch, rel=0.05)
        assert gate.hidden.bias.std().item() == pytest.approx(of_torch, rel=0.2)
    assert psg.encoder.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 5), rel=0.1)
    gates = [gate for name, gate in psg.named_modules() if name.endswith("_gate")]
    assert len(gates) == 4 * 3 + 2
    assert not any(gate.delta.weight.any() or gate.delta.bias.any() for gate in gates)


def test_the_earlier_start_of_the_gates_is_that_of_torch():
    config = ModelConfig(rounds=make_rounds([16, 32], [1, 2]), heads=2, depth=1)
    torch.manual_seed(0)
    model = ProgResViT(config, start_gates="torch")
    hidden = model.psg.blocks[0].out_gate.hidden
    assert hidden.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 128), rel=0.05)
    assert hidden.bias.any()


def test_every_block_and_every_transition_has_gates_of_its_own(small_config, randomize):
    model = randomize(ProgResViT(small_config.replace(rounds=make_rounds([16, 24, 32], [2, 2, 2]))))
    vectors = [vector for s in range(3) for block in model.gates(s).blocks for vector in block]
    vectors += [vector for s in (1, 2) for vector in model.gates(s).fusion]
    for index, vector in enumerate(vectors):
        assert all(not torch.allclose(vector, other) for other in vectors[:index])


def test_gates_follow_the_formula(small_model):
    psg, d = small_model.psg, 64
    condition = torch.nn.functional.silu(psg.encoder(stage_metadata([16, 32], 2)[0, 1]))

    def gate(module):
        return 1 + module.delta(torch.nn.functional.silu(module.hidden(condition)))

    block, own = small_model.gates(0).blocks[1], psg.blocks[1]
    assert torch.allclose(block.attn, (gate(own.attn_gate) * own.attn_scale)[:d], atol=1e-6)
    assert torch.allclose(block.mlp, (gate(own.mlp_gate) * own.mlp_scale)[:d], atol=1e-6)
    assert torch.allclose(block.out, gate(own.out_gate)[:d], atol=1e-6)


def test_metadata_survives_a_change_of_precision(small_model):
    exact = small_model.gates(1)
    assert small_model.bfloat16().gates(1).blocks[0].attn.dtype == torch.bfloat16
    assert torch.equal(small_model.float().psg.metadata, stage_metadata([16, 32], 2))
    assert torch.allclose(small_model.gates(1).blocks[0].attn, exact.blocks[0].attn, atol=0.05)


def test_metadata_is_not_stored_with_the_weights(small_model):
    assert not any("metadata" in key for key in small_model.state_dict())


def test_static_gates_do_not_depend_on_the_round(small_config, randomize, tmp_path):
    static = randomize(ProgResViT(small_config.replace(psg="static")))
    conditioned = ProgResViT(small_config)
    conditioned.load_state_dict(static.state_dict())  # the same parameters
    assert static.gmacs() == conditioned.gmacs()
    assert weights_hash(static) != weights_hash(conditioned)  # a threshold of one is not one of the other
    for first, second in zip(static.gates(0).blocks, static.gates(1).blocks, strict=True):
        for narrow, wide in zip(first, second, strict=True):
            torch.testing.assert_close(narrow, wide[: len(narrow)], atol=1e-6, rtol=0)
    for first, second in zip(conditioned.gates(0).blocks, conditioned.gates(1).blocks, strict=True):
        assert not torch.allclose(first.attn, second.attn[: len(first.attn)])
    progresvit.save(static, tmp_path / "static")
    loaded = progresvit.load(tmp_path / "static")
    assert loaded.config.psg == "static"
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded(images)[1].logits, static.eval()(images)[1].logits)
    assert torch.equal(loaded.half().float().psg.metadata[1], stage_metadata([16, 32], 2)[0])


def test_the_engine_folds_static_gates(small_config, randomize):
    model = randomize(ProgResViT(small_config.replace(psg="static"))).eval()
    images = torch.randn(2, 3, 32, 32)
    first = model.run_round(0, images)
    folded = fold(model)
    torch.testing.assert_close(folded[0](images).logits, first.logits, atol=1e-4, rtol=1e-4)
    second = model.run_round(1, images, first.tokens)
    torch.testing.assert_close(folded[1](images, first.tokens).logits, second.logits, atol=1e-4, rtol=1e-4)
