"""Answers to growing_cache: other right ones, and wrong ones of a second person."""

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
    {MASK: "S = self.length + T\n        "
      "return positions, torch.ones(T, S, dtype=torch.bool).tril(self.length)"},
    # copies of what is held
    {"return keys, values": "return keys.clone(), values.clone()"},
]  # fmt: skip

LENGTH = "return self.held[-1][0].shape[2] if self.held[-1] else 0"
UPDATED = "self.held[layer] = [keys, values]"

WRONG = [
    ("length counts the tokens of the first layer, before the pass is done",
     {LENGTH: "return getattr(self, 'early', 0)",
      "    @property\n": f"    def done(self):\n        {LENGTH}\n\n    @property\n",
      "torch.arange(self.length": "torch.arange(self.done()",
      "keys[self.length :]": "keys[self.done() :]", "held = self.length": "held = self.done()",
      UPDATED: f"{UPDATED}\n        self.early = keys.shape[2] if layer == 0 else self.early"},
     "crop and reset leave it, where that of the table forgets"),
    ("a negative layer is accepted", {"not 0 <= layer < self.n_layer": "layer >= self.n_layer"}),
    ("only the keys are looked at, and lend the values their dtype",
     {"[k.detach(), v.detach()]": "[k.detach(), v.detach().to(k.dtype)]"}),
    ("what does not fit empties the layer",
     {'raise ValueError("other': 'self.held[layer] = []\n            raise ValueError("other'}),
    ("rows are selected in the first layer alone",
     {"self.held = [[x[rows] for x in pair] for pair in self.held]":
      "self.held[0] = [x[rows] for x in self.held[0]]"}),
    ("rows are a set", {"x[rows]": "x[torch.isin(torch.arange(len(x)), rows)]"}),
    ("crop counts the tokens to forget", {"x[:, :, :length]": "x[:, :, : self.length - length]"}),
    ("all caches share their pairs", {"self.held: list[list[Tensor]] =": "GrowingPairs.held ="}),
    ("length is a tensor", {LENGTH: LENGTH.replace("return ", "return torch.tensor(") + ")"}),
    ("positions in int32", {"keys[self.length :]": "keys[self.length :].int()"}),
]  # fmt: skip

SURVIVORS = {
    "return self.held[-1][0].shape[2] if self.held[-1] else 0: 0 => 1 (2)": "keys and values "
    "hold equally many tokens"
}
