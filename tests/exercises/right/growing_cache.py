"""Other right answers to growing_cache."""

import torch
from torch import Tensor

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.exercises.catalogue.growing_cache.checks import MASK, Buffers, Reference


class Tokens(Buffers):
    """A list of single tokens for each layer, put together when they are read."""

    def reset(self):
        self.tokens: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.n_layer)]

    @property
    def length(self):
        return len(self.tokens[-1])

    def update(self, layer, k, v):
        if layer not in list(range(self.n_layer)):
            raise ValueError(layer)
        held = self.tokens[layer]
        if held and any(
            a.dtype != b.dtype or len(a) != len(b) for a, b in zip(held[0], (k, v), strict=True)
        ):
            raise ValueError("does not fit")
        del held[self.length :]
        k, v = k.detach().clone(), v.detach().clone()
        held.extend((k[:, :, t], v[:, :, t]) for t in range(k.shape[2]))
        return torch.stack([k for k, _ in held], 2), torch.stack([v for _, v in held], 2)

    def crop(self, length):
        for held in self.tokens:
            del held[length:]

    def select(self, rows):
        self.tokens = [[(k[rows], v[rows]) for k, v in held] for held in self.tokens]


class Reserved(Reference):
    """The package's cache, with room for many tokens from the start."""

    def __init__(self, n_layer):
        self.cache = GrowingCache(n_layer, reserve=20)


RIGHT = [
    Buffers, Tokens, Reserved,
    # a triangle for the mask
    {
        MASK: "S = self.length + T\n        "
        "return positions, torch.ones(T, S, dtype=torch.bool).tril(self.length)"
    },
]  # fmt: skip

# Automatic mutants of the solution that no case rejects, and why.
SURVIVORS = {
    "return self.held[-1][0].shape[2] if self.held[-1] else 0: 0 => 1 (2)": "keys and values "
    "hold equally many tokens"
}
