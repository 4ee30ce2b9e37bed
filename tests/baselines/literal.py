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
    m = 4 * d if hidden is None else hidden
    for block in model.blocks:
        seen = F.layer_norm(x, (d,), block.norm1.weight[:d], block.norm1.bias[:d], 1e-6)
        rows = [slice(part * model.config.width, part * model.config.width + d) for part in range(3)]
        qkv, layer = [], block.attn.qkv
        for row in rows:
            projected = seen @ layer.weight[row, :d].T + layer.bias[row]
            qkv.append(projected.unflatten(-1, (-1, 64)).transpose(1, 2))
        weights = (qkv[0] @ qkv[1].mT / 8).softmax(dim=-1)
        mixed = (weights @ qkv[2]).transpose(1, 2).flatten(2)
        x = x + mixed @ block.attn.proj.weight[:d, :d].T + block.attn.proj.bias[:d]
        seen = F.layer_norm(x, (d,), block.norm2.weight[:d], block.norm2.bias[:d], 1e-6)
        hidden = F.gelu(seen @ block.mlp.fc1.weight[:m, :d].T + block.mlp.fc1.bias[:m])
        x = x + hidden @ block.mlp.fc2.weight[:d, :m].T + block.mlp.fc2.bias[:d]
    return F.layer_norm(x, (d,), model.norm.weight[:d], model.norm.bias[:d], 1e-6)


def plain_head(model, x):
    """Logits of the class token."""
    return x[:, 0] @ model.head.weight[:, : x.shape[-1]].T + model.head.bias
