"""Norms of queries and keys: what Qwen3 adds to Qwen2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from since_qwen2.whole_models import (
    Ideas,
    Laws,
    Rows,
    bare,
    built,
    near,
    noise,
    whole,
)
from torch import Tensor

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.layers.norm import rms_norm, zero_centred_rms_norm
from lm_from_scratch.layers.rope import (
    RotaryEmbedding,
)

# --------------------------------------------------------------------------------------------- laws


@torch.no_grad()
def scores_are_bounded() -> None:
    """Inputs a thousand times larger change no result of attention but by the values."""
    attention = built("qwen3").model.layers[0].self_attn
    places = torch.arange(6)[None]
    turn, seen = RotaryEmbedding(8)(places, torch.float32), Visibility(places, places)
    queries: list[Tensor] = []
    attention.attend = lambda q, k, v, *how: queries.append(q @ k.repeat_interleave(3, 1).mT) or q
    for scale in (1.0, 1000.0):
        for norm in (attention.q_norm, attention.k_norm):
            norm.eps = 1e-9
        attention(scale * noise(1, 6, 20), turn, seen, NO_CACHE)
    near(queries[1], queries[0], 1e-3)


LAWS: Laws = whole("qwen3") | {"bounded": scores_are_bounded}

# ----------------------------------------------------------------------------------------- mistakes


def normed(
    q_norm: Callable[..., Tensor] = lambda self, q: self.q_norm(q),
    k_norm: Callable[..., Tensor] = lambda self, k: self.k_norm(k),
    after: Callable[..., Any] = lambda self, q, k, v: (q, k, v),
    kept: Callable[..., Tensor] = lambda self, k: k,
) -> Any:
    """Qwen3's attention, given the norms of queries and keys (B, H, T, D) before they are turned,
    what is done ``after`` it, and to the keys that come out of the cache."""

    def forward(self: Any, x: Tensor, rotation: Any, visibility: Any, cache: Any) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (
            project(x).view(B, T, -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rotate(q_norm(self, q), *rotation), self.rotate(k_norm(self, k), *rotation)
        q, k, v = after(self, q, k, v)
        k, v = cache.update(k, v)
        y = self.attend(q, kept(self, k), v, visibility, 0.0)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))

    return forward


def over_all_heads(self: Any, x: Tensor, norm: str) -> Tensor:
    merged = x.transpose(1, 2).flatten(2)
    weight = getattr(self, norm).weight.repeat(x.shape[1])
    return rms_norm(merged, weight, self.q_norm.eps).unflatten(2, (x.shape[1], -1)).transpose(1, 2)


def of_length_1(self: Any, x: Tensor, norm: str) -> Tensor:
    return F.normalize(x, dim=-1) * getattr(self, norm).weight


def both(how: Callable[..., Tensor]) -> Any:
    return normed(partial(how, norm="q_norm"), partial(how, norm="k_norm"))


def by_formula(self: Any, x: Tensor, norm: str) -> Tensor:
    part = getattr(self, norm)
    return x / (x.square().mean(-1, keepdim=True) + part.eps).sqrt() * part.weight


QWEN3 = "models.qwen3:Attention.forward"
SAME: Rows = [
    ("attention", QWEN3, normed()),
    ("the norm by its formula", QWEN3, both(by_formula)),
]
MUTANTS: Rows = [
    ("no norm", QWEN3, normed(bare, bare)),
    ("queries alone", QWEN3, normed(k_norm=bare)),
    ("keys alone", QWEN3, normed(q_norm=bare)),
    ("values too", QWEN3, normed(after=lambda self, q, k, v: (q, k, self.k_norm(v)))),
    (
        "after the rotation",
        QWEN3,
        normed(bare, bare, lambda self, q, k, v: (self.q_norm(q), self.k_norm(k), v)),
    ),
    ("keys again out of the cache", QWEN3, normed(kept=lambda self, k: self.k_norm(k))),
    ("all heads as one", QWEN3, both(over_all_heads)),
    ("length 1, not mean square 1", QWEN3, both(of_length_1)),
    (
        "the norms exchanged",
        QWEN3,
        normed(lambda self, q: self.k_norm(q), lambda self, k: self.q_norm(k)),
    ),
    (
        "weights counted from 1",
        QWEN3,
        both(lambda self, x, norm: zero_centred_rms_norm(x, getattr(self, norm).weight, 0.05)),
    ),
]


IDEAS: Ideas = {"QK-norm": (LAWS, SAME, MUTANTS)}
