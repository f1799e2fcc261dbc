"""Sinks of gpt-oss and gates of Qwen3-Next."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from since_qwen2.whole_models import (
    DOUBLE,
    Ideas,
    Laws,
    Rows,
    exact,
    noise,
    whole,
)
from torch import Tensor

from lm_from_scratch.attention import sinks as sink_kinds
from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.gqa import repeat_kv
from lm_from_scratch.attention.visibility import Visibility, positions_from_mask
from lm_from_scratch.layers.norm import rms_norm

# --------------------------------------------------------------------------------------------- laws


def turned_down() -> None:
    """A sink turns plain attention down by the sigmoid of (log of the sum of exp) - sink, in
    float64, with padding, for several queries and for one."""
    q, k, v, z = (
        noise(*s, seed=len(s), dtype=DOUBLE)
        for s in ((2, 4, 6, 5), (2, 2, 6, 5), (2, 2, 6, 5), (4,))
    )
    positions = positions_from_mask(torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]]))
    for T in (6, 3, 1):
        seen, some = Visibility(positions[:, 6 - T :], positions), q[:, :, 6 - T :]
        scores = some @ k.repeat_interleave(2, 1).mT / math.sqrt(5)
        total = scores.masked_fill(~seen.mask, -torch.inf).logsumexp(-1, keepdim=True)
        passed = torch.sigmoid(total - z.view(1, -1, 1, 1))
        want = passed * formula_attention(some, k, v, seen)
        for name in ("formula_sink_attention", "sink_attention"):
            exact(getattr(sink_kinds, name)(some, k, v, seen, z, 0.0), want)


SINK_LAWS: Laws = (
    whole("sinks") | whole("sinks", " formula", formula=True) | {"turned down": turned_down}
)
GATE_LAWS: Laws = whole("partial")

# ----------------------------------------------------------------------------------------- mistakes

# -------------------------------------------------------------------------------------------- sinks


def fused(
    score: Callable[[Tensor, int], Tensor] = lambda z, D: z * math.sqrt(D),
    value: float = 0.0,
    shown: bool = True,
    shifted: bool = True,
    one: Any = sink_kinds.one_query_with_sinks,
) -> Any:
    """Sinks by one more key, given its score, its value, whether a mask shows it, whether there is
    one more query, and what is done for one query."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, visibility: Any, sinks: Tensor, dropout: float = 0.0
    ) -> Tensor:
        (B, H, T, D), W = q.shape, sink_kinds.WIDER
        if T == 1:
            return one(q, k, v, visibility, sinks, dropout)
        causal = visibility.is_causal
        column = score(sinks, D).view(1, H, 1, 1).expand(B, H, T, 1)
        q = F.pad(torch.cat([q, column], dim=-1), (0, W - 1, int(causal and shifted), 0))
        beside = F.one_hot(torch.tensor(D), D + W).to(k.dtype).expand(*k.shape[:2], 1, -1)
        y = F.scaled_dot_product_attention(
            q,
            torch.cat([beside, F.pad(k, (0, W))], dim=2),
            F.pad(v, (0, W, 1, 0), value=value),
            None if causal else F.pad(visibility.mask, (1, 0), value=shown),
            is_causal=causal,
            scale=1 / math.sqrt(D),
            enable_gqa=k.shape[1] != H,
        )
        return y[:, :, int(causal and shifted) :, : v.shape[-1]]

    return attention


def alone(order: Callable[[Tensor, int], Tensor]) -> Any:
    """One query, given the order of sinks."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, visibility: Any, sinks: Tensor, dropout: float = 0.0
    ) -> Tensor:
        return sink_kinds.one_query_with_sinks(q, k, v, visibility, order(sinks, k.shape[1]))

    return attention


def sink_free(q: Tensor, k: Tensor, v: Tensor, visibility: Any, *rest: Any) -> Tensor:
    return sink_kinds.sink_attention(q, k, v, visibility, torch.full((q.shape[1],), -1e4).to(q))


def weighed(
    sink: Callable[[Tensor, int], Tensor] = lambda z, D: z,
    cut: slice = slice(1, None),
    last: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> Any:
    """The formula, given the score of a sink, which columns are kept, and the end."""

    def weights(q: Tensor, k: Tensor, visibility: Any, sinks: Tensor) -> Tensor:
        scores = q @ repeat_kv(k, q.shape[1]).mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~visibility.mask, -torch.inf)
        column = sink(sinks, q.shape[-1]).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return last(torch.softmax(torch.cat([column, scores], dim=-1), dim=-1)[..., cut])

    return weights


FAST, SLOW, ONE = (
    "models.sink_attention:sink_attention",
    "attention.sinks:sink_weights",
    "attention.sinks:one_query_with_sinks",
)
SINKS_SAME: Rows = [
    ("the fused form", FAST, fused()),
    ("the formula", SLOW, weighed()),
    ("one query as many are", FAST, fused(one=sink_kinds.formula_sink_attention)),
]
SINKS: Rows = [
    ("a sink over the root of D", FAST, fused(lambda z, D: z)),
    ("the same in the formula", SLOW, weighed(lambda z, D: z / math.sqrt(D))),
    ("a sink with a value", FAST, fused(value=1.0)),
    ("a mask hides the sink", FAST, fused(shown=False)),
    ("a triangle shifted by the sink", FAST, fused(shifted=False)),
    ("one sink for all heads", FAST, fused(lambda z, D: z.mean().expand_as(z) * math.sqrt(D))),
    ("sinks that are always 0", SLOW, weighed(lambda z, D: 0 * z)),
    ("no gradient for sinks", FAST, fused(lambda z, D: z.detach() * math.sqrt(D))),
    ("the sign turned", FAST, fused(lambda z, D: -z * math.sqrt(D))),
    ("the last key dropped, not the sink", SLOW, weighed(cut=slice(None, -1))),
    (
        "weights that sum to 1 again",
        SLOW,
        weighed(last=lambda w: w / w.sum(-1, True).clamp(min=1e-9)),
    ),
    ("no sink for one query", FAST, fused(one=sink_free)),
    (
        "sinks of other heads for one query",
        FAST,
        fused(one=alone(lambda z, groups: z.view(-1, groups).T.reshape(-1))),
    ),
]

# -------------------------------------------------------------------------------------------- gates


def gated(
    split: Callable[..., Any] = lambda both, D: both.unflatten(2, (-1, 2 * D)).chunk(2, dim=-1),
    squash: Callable[[Tensor], Tensor] = torch.sigmoid,
    gate_norm: Callable[..., Tensor] = lambda self, gate, rotation: gate,
    when: str = "after",
    merge: Callable[[Tensor], Tensor] = lambda y: y.transpose(1, 2),
) -> Any:
    """Gated attention, given how one projection becomes queries and gates (B, T, H, D)."""

    def forward(self: Any, x: Tensor, rotation: Any, visibility: Any, cache: Any) -> Tensor:
        B, T, _ = x.shape
        q, gate = split(self.q_proj(x), self.head_dim)
        gate = squash(gate_norm(self, gate, rotation))
        k, v = (p(x).view(B, T, -1, self.head_dim) for p in (self.k_proj, self.v_proj))
        q = self.q_norm(q * gate if when == "before" else q)
        q, k, v = (x.transpose(1, 2) for x in (q, self.k_norm(k), v))
        q, k = self.rotate(q, *rotation), self.rotate(k, *rotation)
        k, v = cache.update(k, v)
        y = merge(self.attend(q, k, v, visibility, 0.0))
        return self.o_proj((y * gate if when == "after" else y).reshape(B, T, -1))

    return forward


def halves(both: Tensor, D: int) -> list[Tensor]:
    return [x.unflatten(2, (-1, D)) for x in both.chunk(2, dim=-1)]


GATED = "models.gated_attention:GatedAttention.forward"
GATES_SAME: Rows = [
    ("the layer", GATED, gated()),
    (
        "split by its view",
        GATED,
        gated(lambda both, D: both.view(*both.shape[:2], -1, 2, D).unbind(3)),
    ),
]
GATES: Rows = [
    ("gates in the second half of all rows", GATED, gated(halves)),
    (
        "first the gate, then the query",
        GATED,
        gated(lambda both, D: both.unflatten(2, (-1, 2 * D)).chunk(2, dim=-1)[::-1]),
    ),
    (
        "every second feature",
        GATED,
        gated(lambda both, D: both.unflatten(2, (-1, D, 2)).unbind(-1)),
    ),
    ("silu", GATED, gated(squash=F.silu)),
    ("no gate", GATED, gated(squash=torch.ones_like)),
    ("one gate for a head", GATED, gated(squash=lambda g: g.mean(-1, True).sigmoid())),
    ("the gate normed as the query", GATED, gated(gate_norm=lambda self, g, _: self.q_norm(g))),
    (
        "the gate turned as the query",
        GATED,
        gated(
            gate_norm=lambda self, g, turn: self.rotate(g.transpose(1, 2), *turn).transpose(1, 2)
        ),
    ),
    ("the query gated", GATED, gated(when="before")),
    (
        "heads merged without transpose",
        GATED,
        gated(merge=lambda y: y.reshape(y.shape[0], y.shape[2], y.shape[1], y.shape[3])),
    ),
    (
        "weights of norms not counted from 1",
        "layers.norm:zero_centred_rms_norm",
        lambda x, weight, eps: rms_norm(x, weight, eps),
    ),
]


IDEAS: Ideas = {
    "sinks": (SINK_LAWS, SINKS_SAME, SINKS),
    "gates": (GATE_LAWS, GATES_SAME, GATES),
}
