"""A hash of the pixels of images, by which copies are found. It costs less than 1 % of an evaluation.

It is multilinear (Carter and Wegman 1979, "Universal classes of hash functions"): the sum of all words of 32 bits times
fixed random odd numbers, modulo 2^64. Two images of the same size have the same hash with a probability of at most
2^-32 over the draw of the numbers. The numbers are public, so images can be made on purpose that share a hash.

Letters: B images, C channels, H and W height and width, M words of an image.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

WORD = 4
"""Bytes of a word."""
IN_CACHE = 1 << 15
"""Words that a CPU hashes at a time, which its cache holds: at 224 pixels one image, six times as fast as a batch."""


def image_hash(pixels: Tensor) -> Tensor:
    """The hash of each image, on the device of the pixels, which are bytes: (B, C, H, W) -> (B,) int64."""
    size = torch.tensor(pixels.shape[1:], device=pixels.device)  # (3,)
    values = pixels.flatten(1)
    words = F.pad(values, (0, -values.shape[1] % WORD)).contiguous().view(torch.int32)  # (B, M)
    factors = _factors(1 << (len(size) + words.shape[1]).bit_length(), pixels.device)
    of_size, of_words = factors[: len(size)], factors[len(size) : len(size) + words.shape[1]]
    group = len(words) if words.is_cuda else max(1, IN_CACHE // words.shape[1])
    sums = [(rows * of_words).sum(dim=1) for rows in words.split(group)]  # int32 times int64 is int64
    return torch.cat(sums) + (size * of_size).sum()


@lru_cache(maxsize=8)
def _factors(count: int, device: torch.device) -> Tensor:
    """Fixed random odd numbers, (count,): the first outputs of SplitMix64 (Steele et al. 2014)."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((state ^ (state >> np.uint64(31))) | np.uint64(1)).view(np.int64)).to(device)
