"""The authors' key names and their formula, written out by hand and apart from the package."""

import math
from itertools import pairwise

import torch

EPS = 1e-6


class Trap:
    """Its pickle creates a file when it is opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def authors_state(*, width, widths, depth, patch_size, grid, classes, layer_scale=False):
    """A checkpoint under the authors' names with every weight random, gates too."""
    shapes = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, grid * grid + 1, width),
        "patch_embed.proj.weight": (width, 3, patch_size, patch_size),
        "patch_embed.proj.bias": (width,),
        "norm.weight": (width,),
        "norm.bias": (width,),
        "head.weight": (classes, width),
        "head.bias": (classes,),
        "cond_mlp.net.0.weight": (128, 5),
        "cond_mlp.net.0.bias": (128,),
    }

    def linear(name, outputs, inputs):
        shapes.update({f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)})

    def gate(name, outputs):
        linear(f"{name}.net.0", 128, 128)
        linear(f"{name}.net.2", outputs, 128)

    for b in range(depth):
        block = f"blocks.{b}"
        for norm in ("norm1", "norm2"):
            shapes.update({f"{block}.{norm}.weight": (width,), f"{block}.{norm}.bias": (width,)})
        linear(f"{block}.attn.qkv", 3 * width, width)
        linear(f"{block}.attn.proj", width, width)
        linear(f"{block}.mlp.fc1", 4 * width, width)
        linear(f"{block}.mlp.fc2", width, 4 * width)
        for part in ("attn", "mlp", "out"):
            gate(f"{block}.gate_{part}", width)
        for scale in ("prog_ls1", "prog_ls2", *(("ls1", "ls2") if layer_scale else ())):
            shapes[f"{block}.{scale}.gamma"] = (width,)
    for t, (source, target) in enumerate(pairwise(widths)):
        shapes[f"token_projectors.{t}.depthwise_proj.weight"] = (source, 1, 3, 3)
        shapes[f"token_projectors.{t}.spatial_proj.weight"] = (target, source, 1, 1)
        shapes[f"token_projectors.{t}.spatial_proj.bias"] = (target,)
        linear(f"token_projectors.{t}.prefix_proj", target, source)
        gate(f"fusion_input_delta.{t}", target)
        gate(f"fusion_prev_delta.{t}", target)
    state = {name: 0.15 * torch.randn(shape) for name, shape in shapes.items()}
    for name in state:
        if name.endswith("gamma") or ("norm" in name and name.endswith("weight")):
            state[name] += 1
    return state


def authors_forward(state, images, *, resolutions, widths):
    """Logits of every round, step by step as the method is written down."""
    depth = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    outputs, tokens = [], None
    for s, (r, d) in enumerate(zip(resolutions, widths)):
        r_prev = resolutions[s - 1] if s else r
        x = embed(state, images, r, d)
        if s:
            carried = project(state, s - 1, tokens, x.shape[1])
            meta = metadata(s, 0, len(resolutions), depth, r, r_prev)
            x = gate(state, f"fusion_input_delta.{s - 1}", meta) * x
            x = x + gate(state, f"fusion_prev_delta.{s - 1}", meta) * carried
        for b in range(depth):
            x = block(state, b, x, metadata(s, b, len(resolutions), depth, r, r_prev))
        tokens = norm(x, state["norm.weight"], state["norm.bias"])
        outputs.append(tokens[:, 0] @ state["head.weight"][:, :d].T + state["head.bias"])
    return outputs


def metadata(s, b, rounds, depth, r, r_prev):
    progress = (s * depth + b) / max(1, rounds * depth - 1)
    return torch.tensor([s, progress, math.log2(r / 224), math.log2(r_prev / 224), math.log2(r / r_prev)])


def gate(state, name, meta):
    silu = torch.nn.functional.silu
    condition = silu(state["cond_mlp.net.0.weight"] @ meta + state["cond_mlp.net.0.bias"])
    hidden = silu(state[f"{name}.net.0.weight"] @ condition + state[f"{name}.net.0.bias"])
    return 1 + state[f"{name}.net.2.weight"] @ hidden + state[f"{name}.net.2.bias"]


def norm(x, weight, bias):
    d = x.shape[-1]
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / (variance + EPS).sqrt() * weight[:d] + bias[:d]


def embed(state, images, r, d):
    bicubic = {"mode": "bicubic", "antialias": True, "align_corners": False}
    images = torch.nn.functional.interpolate(images, size=(r, r), **bicubic)
    weight = state["patch_embed.proj.weight"]
    patch = weight.shape[-1]
    g = r // patch
    cut = images.unfold(2, patch, patch).unfold(3, patch, patch)  # (B, C, g, g, p, p)
    cut = cut.permute(0, 2, 3, 1, 4, 5).reshape(len(images), g * g, -1)
    x = cut @ weight.reshape(weight.shape[0], -1).T + state["patch_embed.proj.bias"]
    position = state["pos_embed"]
    stored = math.isqrt(position.shape[1] - 1)
    grid = position[:, 1:].reshape(1, stored, stored, -1).permute(0, 3, 1, 2)
    grid = torch.nn.functional.interpolate(grid, size=(g, g), **bicubic).flatten(2).transpose(1, 2)
    x = torch.cat([(state["cls_token"] + position[:, :1]).repeat(len(images), 1, 1), x + grid], dim=1)
    return x[..., :d]


def project(state, t, tokens, count):
    source, target = math.isqrt(tokens.shape[1] - 1), math.isqrt(count - 1)
    d = tokens.shape[-1]
    grid = tokens[:, 1:].transpose(1, 2).reshape(len(tokens), d, source, source)
    grid = torch.nn.functional.interpolate(grid, size=(target, target), mode="bilinear", align_corners=False)
    name = f"token_projectors.{t}"
    grid = torch.nn.functional.conv2d(grid, state[f"{name}.depthwise_proj.weight"], padding=1, groups=d)
    patches = grid.flatten(2).transpose(1, 2) @ state[f"{name}.spatial_proj.weight"][:, :, 0, 0].T
    patches = patches + state[f"{name}.spatial_proj.bias"]
    prefix = tokens[:, :1] @ state[f"{name}.prefix_proj.weight"].T + state[f"{name}.prefix_proj.bias"]
    return torch.cat([prefix, patches], dim=1)


def block(state, b, x, meta):
    p, d = f"blocks.{b}", x.shape[-1]
    ones = torch.ones(d)

    def scaled(update, gate_name, scale, layer_scale):
        update = update * state.get(f"{p}.{layer_scale}.gamma", ones)[:d] * state[f"{p}.{scale}.gamma"][:d]
        return gate(state, f"{p}.{gate_name}", meta)[:d] * update

    y = attention(state, p, norm(x, state[f"{p}.norm1.weight"], state[f"{p}.norm1.bias"]))
    x = x + scaled(y, "gate_attn", "prog_ls1", "ls1")
    y = norm(x, state[f"{p}.norm2.weight"], state[f"{p}.norm2.bias"])
    y = y @ state[f"{p}.mlp.fc1.weight"][: 4 * d, :d].T + state[f"{p}.mlp.fc1.bias"][: 4 * d]
    y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
    y = y @ state[f"{p}.mlp.fc2.weight"][:d, : 4 * d].T + state[f"{p}.mlp.fc2.bias"][:d]
    x = x + scaled(y, "gate_mlp", "prog_ls2", "ls2")
    return gate(state, f"{p}.gate_out", meta)[:d] * x


def attention(state, p, x):
    d, heads = x.shape[-1], x.shape[-1] // 64
    weight, bias = state[f"{p}.attn.qkv.weight"], state[f"{p}.attn.qkv.bias"]
    width = weight.shape[1]
    parts = []
    for part in range(3):
        rows = slice(part * width, part * width + d)
        parts.append((x @ weight[rows, :d].T + bias[rows]).reshape(*x.shape[:2], heads, 64).transpose(1, 2))
    q, k, v = parts
    mixed = ((q @ k.transpose(-1, -2)) / 8).softmax(-1) @ v
    mixed = mixed.transpose(1, 2).reshape(x.shape)
    return mixed @ state[f"{p}.attn.proj.weight"][:d, :d].T + state[f"{p}.attn.proj.bias"][:d]
