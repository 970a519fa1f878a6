"""Sizes of a Llama that is trained from random weights, by the job's name for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scratch:
    """The shape of a Llama trained from random weights, with a vocabulary learnt from its own data."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp_width: int
    context: int


SCRATCH = {
    "llama-3m": Scratch(4096, 192, 6, 6, 3, 512, 1024),
    "llama-10m": Scratch(8192, 320, 7, 5, 5, 864, 1024),
    "llama-30m": Scratch(16384, 512, 8, 8, 4, 1376, 2048),
    "llama-110m": Scratch(32000, 768, 12, 12, 12, 2048, 2048),
    "llama-1b": Scratch(32000, 2048, 22, 32, 4, 5632, 2048),
}
