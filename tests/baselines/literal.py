"""The parts of a sliced ViT, written with nothing but products."""

import torch
import torch.nn.functional as F


def plain_embedding(model, images):
    """Tokens at the full width, for images of the stored resolution and patches of 16 pixels."""
    patches = F.conv2d(images, model.patch_embed.proj.weight, model.patch_embed.proj.bias, stride=16).flatten(2).mT
    return torch.cat([model.cls_token.expand(len(images), -1, -1), patches], dim=1) + model.pos_embed


def plain_blocks(model, x, hidden=None):
    """Blocks and final norm at the width of x, with the leading hidden channels of the MLPs (all 4d if None)."""
    d = x.shape[-1]
    for block in model.blocks:
        x = plain_block(block, x, 4 * d if hidden is None else hidden)
    return F.layer_norm(x, (d,), model.norm.weight[:d], model.norm.bias[:d], 1e-6)


def plain_block(block, x, m):
    """A block at the width of x, with m hidden channels of the MLP."""
    d, layer = x.shape[-1], block.attn.qkv
    seen = F.layer_norm(x, (d,), block.norm1.weight[:d], block.norm1.bias[:d], 1e-6)
    qkv = []
    for start in (0, layer.in_features, 2 * layer.in_features):
        projected = seen @ layer.weight[start : start + d, :d].T + layer.bias[start : start + d]
        qkv.append(projected.unflatten(-1, (-1, 64)).transpose(1, 2))
    weights = (qkv[0] @ qkv[1].mT / 8).softmax(dim=-1)
    mixed = (weights @ qkv[2]).transpose(1, 2).flatten(2)
    x = x + mixed @ block.attn.proj.weight[:d, :d].T + block.attn.proj.bias[:d]
    seen = F.layer_norm(x, (d,), block.norm2.weight[:d], block.norm2.bias[:d], 1e-6)
    hidden = F.gelu(seen @ block.mlp.fc1.weight[:m, :d].T + block.mlp.fc1.bias[:m])
    return x + hidden @ block.mlp.fc2.weight[:d, :m].T + block.mlp.fc2.bias[:d]


def plain_head(model, x):
    """Logits of the class token."""
    return x[:, 0] @ model.head.weight[:, : x.shape[-1]].T + model.head.bias
