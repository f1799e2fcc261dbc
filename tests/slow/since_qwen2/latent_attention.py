"""Multi-head latent attention, both of its forms, with experts behind a router by sigmoid."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from caches import in_chunks
from since_qwen2.whole_models import (
    DOUBLE,
    ROWS,
    Ideas,
    Laws,
    Rows,
    bare,
    built,
    exact,
    near,
    noise,
    whole,
)
from torch import Tensor

from lm_from_scratch.attention import latent as latents
from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.layers import experts
from lm_from_scratch.layers.rope import (
    apply_rope,
)
from lm_from_scratch.models.deepseek_v3 import LatentAttention
from lm_from_scratch.weights.lora import add_lora_

# --------------------------------------------------------------------------------------------- laws


def both_orders() -> None:
    """Absorbed is expanded, in float64, in value and gradient."""
    from lm_from_scratch.models import deepseek_v3 as mla

    B, H, T, S, R, Dn, Dr, Dv = 2, 3, 4, 7, 9, 5, 4, 6
    shapes = (B, H, T, Dn + Dr), (B, 1, S, R), (B, 1, S, Dr), (H * (Dn + Dv), R)
    leaves = [noise(*shape, seed=i, dtype=DOUBLE) for i, shape in enumerate(shapes)]
    q, latent, shared, weight = (x.requires_grad_() for x in leaves)
    keys = torch.arange(S)[None].repeat(B, 1)
    keys[1, :2] = -1
    how = Visibility(keys[:, S - T :], keys), formula_attention
    upstream, found = noise(B, H, T, Dv, seed=9, dtype=DOUBLE), []
    for y in (
        mla.absorbed(q, latent, shared, weight, *how),
        mla.expanded(q, latent @ weight.T, shared, *how),
    ):
        found.append((y, torch.autograd.grad(y, (q, latent, shared, weight), upstream)))
    exact(*found)


@torch.no_grad()
def an_adapter_counts() -> None:
    """Low rank beside the matrix that would be absorbed: in pieces and whole."""
    model = built("deepseek_v3")
    add_lora_(model, rank=2, select=lambda name: "kv_b_proj" in name)
    for name, p in model.named_parameters():
        if name.endswith("lora_b"):
            p.copy_(0.5 * noise(*p.shape))
    idx = torch.tensor(ROWS[:1])
    near(in_chunks(idx, [5, 1, 3, 3], model=model), model(idx))


@torch.no_grad()
def few_numbers_are_kept() -> None:
    """Of a token and a layer the latent and one turned key, however many heads there are."""
    model, cache = built("deepseek_v3"), GrowingCache(3, reserve=12)
    model(torch.tensor(ROWS[:1]), cache=cache)
    assert cache.nbytes == 12 * 3 * (16 + 4) * 4


LAWS: Laws = whole("deepseek_v3") | {
    "absorbed = expanded": both_orders,
    "adapter": an_adapter_counts,
    "bytes": few_numbers_are_kept,
}

# ----------------------------------------------------------------------------------------- mistakes


def latent(
    norm: Callable[..., Tensor] = lambda self, c: self.kv_a_layernorm(c),
    turn: Callable[..., Tensor] = lambda self, r, rotation: self.rotate(r, *rotation),
    queries: Callable[..., Tensor] = lambda self, x: self.queries(x),
    parts: Callable[..., Any] = lambda q, Dn, Dr: q.tensor_split([Dn], dim=-1),
    sharpen: Callable[..., Tensor] = lambda self, q: q * self.sharpness,
    read: Callable[..., Tensor] = lambda self, c: c,
    reread: Callable[..., Tensor] = lambda self, r, rotation: r,
) -> Any:
    """DeepSeek-V3's attention, given how latent, shared key and queries are made, and what is done
    with latents and keys that come out of the cache."""

    def forward(self: Any, x: Tensor, rotation: Any, visibility: Any, cache: Any) -> Tensor:
        (B, T, _), (R, Dn, Dr, _) = x.shape, self.sizes
        q = queries(self, x).view(B, T, self.n_head, -1).transpose(1, 2)
        still, turned = parts(q, Dn, Dr)
        q = sharpen(self, torch.cat([still, self.rotate(turned, *rotation)], dim=-1))
        c, r = self.kv_a_proj_with_mqa(x)[:, None].tensor_split([R], dim=-1)
        c, r = cache.update(norm(self, c), turn(self, r, rotation))
        c, r = read(self, c), reread(self, r, rotation)
        how = visibility, self.attend, 0.0
        if self.absorbs(T, c.shape[2]):
            y = latents.absorbed(q, c, r, self.kv_b_proj.weight, *how)
        else:
            y = latents.expanded(q, self.kv_b_proj(c), r, *how)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))

    return forward


def absorbing(
    scale: Callable[[int, int, int], float] = lambda R, Dr, D: math.sqrt((R + Dr) / D),
    keys: Callable[[Tensor], Tensor] = lambda w: w,
    values: Callable[[Tensor], Tensor] = lambda w: w,
) -> Any:
    """The absorbed form, given the scale of queries and the two matrices (H, ., R)."""

    def absorbed(
        q: Tensor, c: Tensor, r: Tensor, weight: Tensor, visibility: Any, attend: Any, *how: Any
    ) -> Tensor:
        (H, D), R, Dr = q.shape[1::2], c.shape[3], r.shape[3]
        w_k, w_v = weight.view(H, -1, R).tensor_split([D - Dr], dim=1)
        q = torch.cat([q[..., : D - Dr] @ keys(w_k), q[..., D - Dr :]], dim=-1)
        y = attend(q * scale(R, Dr, D), torch.cat([c, r], dim=-1), c, visibility, *how)
        return y @ values(w_v).mT

    return absorbed


def all_keys_then_all_values(
    q: Tensor, kv: Tensor, shared: Tensor, visibility: Any, attend: Any, *how: Any
) -> Tensor:
    (B, H, _, D), (S, Dr) = q.shape, shared.shape[2:]
    k, v = kv[:, 0].tensor_split([H * (D - Dr)], dim=-1)
    k, v = (x.view(B, S, H, -1).transpose(1, 2) for x in (k, v))
    k = torch.cat([k, shared.expand(-1, H, -1, -1)], dim=-1)
    return attend(q, k, v, visibility, *how)


def first_head_alone(q: Tensor, kv: Tensor, shared: Tensor, *how: Any) -> Tensor:
    q = q.clone()
    q[:, 1:, :, -shared.shape[3] :] = 0.0
    return latents.expanded(q, kv, shared, *how)


def queries_not_normed(self: Any, x: Tensor) -> Tensor:
    return self.q_b_proj(self.q_a_proj(x))


def sharpness_of_turned(self: Any, q: Tensor) -> Tensor:
    Dr = self.sizes[2]
    return torch.cat([q[..., :-Dr], q[..., -Dr:] * self.sharpness], dim=-1)


def config_eps(self: Any, config: Any, init: Any = LatentAttention.__init__) -> None:
    init(self, config)
    self.kv_a_layernorm.eps = self.q_a_layernorm.eps = config.rms_norm_eps


def half_split(self: Any, config: Any, init: Any = LatentAttention.__init__) -> None:
    init(self, config)
    self.rotate = apply_rope


MLA, ABSORBED, EXPANDED = (
    "models.deepseek_v3:LatentAttention.forward",
    "models.deepseek_v3:absorbed",
    "models.deepseek_v3:expanded",
)
SAME: Rows = [
    ("the layer", MLA, latent()),
    (
        "latents normed when they are read",
        MLA,
        latent(bare, read=lambda self, c: self.kv_a_layernorm(c)),
    ),
    ("the absorbed form", ABSORBED, absorbing()),
    ("never absorbed", "models.deepseek_v3:LatentAttention.absorbs", lambda self, T, S: False),
]
MUTANTS: Rows = [
    ("the latent not normed", MLA, latent(bare)),
    (
        "the latent normed again when it is read",
        MLA,
        latent(read=lambda self, c: self.kv_a_layernorm(c)),
    ),
    ("the shared key not turned", MLA, latent(turn=lambda self, r, rotation: r)),
    (
        "kept bare, turned by the places of the queries",
        MLA,
        latent(
            turn=lambda self, r, rotation: r,
            reread=lambda self, r, rotation: self.rotate(
                r, *(x[..., -1:, :] if x.shape[2] != r.shape[2] else x for x in rotation)
            ),
        ),
    ),
    (
        "the first features of a query turned",
        MLA,
        latent(parts=lambda q, Dn, Dr: (q[..., Dr:], q[..., :Dr])),
    ),
    ("queries not normed", MLA, latent(queries=queries_not_normed)),
    ("sharpness not squared", MLA, latent(sharpen=lambda self, q: q * math.sqrt(self.sharpness))),
    ("sharpness of turned features alone", MLA, latent(sharpen=sharpness_of_turned)),
    ("no sharpness", MLA, latent(sharpen=lambda self, q: q)),
    ("pairs half-split", "models.deepseek_v3:LatentAttention.__init__", half_split),
    ("the norms take the config's eps", "models.deepseek_v3:LatentAttention.__init__", config_eps),
    ("absorbed scores over the root of R + Dr", ABSORBED, absorbing(lambda R, Dr, D: 1.0)),
    ("absorbed scores over the root of R", ABSORBED, absorbing(lambda R, Dr, D: math.sqrt(R / D))),
    ("the matrix of the next head", ABSORBED, absorbing(keys=lambda w: w.roll(1, 0))),
    ("values of the first head", ABSORBED, absorbing(values=lambda w: w[:1].expand_as(w))),
    ("all keys, then all values", EXPANDED, all_keys_then_all_values),
    ("a shared key for the first head alone", EXPANDED, first_head_alone),
    (
        "an adapter is passed over",
        "models.deepseek_v3:LatentAttention.absorbs",
        lambda self, T, S: T == 1,
    ),
    (
        "the layer without a bias for experts",
        "layers.experts:SigmoidRouter.forward",
        lambda self, x: experts.sigmoid_routing(
            F.linear(x, self.weight),
            torch.zeros(len(self.weight)),
            self.top_k,
            self.normalize,
            self.scale,
            self.n_group,
            self.top_group,
        ),
    ),
]


IDEAS: Ideas = {"latent": (LAWS, SAME, MUTANTS)}
