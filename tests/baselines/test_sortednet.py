"""SortedNet: HydraViT's sub-networks under a kind of their own."""

import torch

import progresvit
from progresvit.baselines.hydravit import HydraViT, HydraViTConfig
from progresvit.baselines.sortednet import SortedNet, SortedNetConfig
from progresvit.config import make_rounds

TINY = {"rounds": make_rounds([32, 32], [1, 2]), "heads": 2, "depth": 2, "num_classes": 5}


def test_its_sub_networks_are_those_of_hydravit(randomize, images):
    model, other = randomize(SortedNet(SortedNetConfig(**TINY))), HydraViT(HydraViTConfig(**TINY)).eval()
    other.load_state_dict(model.state_dict())
    for mine, theirs in zip(model(images), other(images), strict=True):
        assert torch.equal(mine.logits, theirs.logits)
    assert model.gmacs() == other.gmacs()
    assert not model.config.routable


def test_a_folder_keeps_its_kind(tmp_path):
    loaded = progresvit.load(progresvit.save(SortedNet(SortedNetConfig(**TINY)), tmp_path / "model"))
    assert type(loaded) is SortedNet
    assert loaded.config.kind == "sortednet"
