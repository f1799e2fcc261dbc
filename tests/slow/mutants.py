"""Classic mistakes, put in place and run: which laws find them.

    PYTHONPATH=tests/helpers python tests/slow/mutants.py      # a line for each; seconds

A *mutant* is a function that stands in the place of another while the laws run. Those here are
mistakes that implementations of Qwen2 really had. A law compares with ``transformers``: a full
forward pass, a left-padded one, one that is fed 5, 1, 3, 3 tokens through a cache, each through the
formula and through the fused kernel. A full pass sees no mistake of masks and caches: that is why
there are three. The first mutants are none: the same code written again, which must survive.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from caches import in_chunks
from tiny_models import hf_twin, tiny_qwen2, token_ids
from torch import Tensor, nn

from lm_from_scratch.attention.gqa import repeat_kv
from lm_from_scratch.attention.kinds import use_attention_
from lm_from_scratch.attention.visibility import Visibility, positions_from_mask
from lm_from_scratch.cache.interface import place
from lm_from_scratch.layers.rope import RotaryEmbedding, apply_rope, apply_rope_interleaved
from lm_from_scratch.models.qwen2 import Qwen2ForCausalLM, Qwen2Model

Laws = dict[str, Callable[[], None]]


@dataclass(frozen=True)
class Mutant:
    """What is wrong, where it is put (``module:attribute``), and the code."""

    label: str
    where: str
    code: Any


def killers(mutant: Mutant, laws: Laws) -> list[str]:
    """The laws that do not hold while the mutant is in place; an error is as good as a number."""
    module, _, attribute = mutant.where.partition(":")
    *path, last = attribute.split(".")
    found = []
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, of the numbers that a mistake makes
        owner = importlib.import_module(f"lm_from_scratch.{module}")
        for name in path:
            owner = getattr(owner, name)
        patch.setattr(owner, last, mutant.code)
        for law, holds in laws.items():
            try:
                holds()
            except AssertionError:
                found.append(law)
            except Exception as error:
                found.append(f"{law} ({type(error).__name__})")
    return found


def judged(
    same: Iterable[tuple[Mutant, Laws]],
    mutants: Iterable[tuple[Mutant, Laws]],
    survivors: dict[str, str],
) -> dict[str, Any]:
    """Every mutant with its killers. Raises ``AssertionError`` where right code is killed, a mutant
    survives without a reason, or one that has a reason is killed."""
    for mutant, laws in same:
        assert (by := killers(mutant, laws)) == [], f"{mutant.label}, which is right: {by}"
    found = {mutant.label: killers(mutant, laws) for mutant, laws in mutants}
    alive = {label for label, by in found.items() if not by}
    assert alive == survivors.keys(), f"survived: {alive}, with a reason: {set(survivors)}"
    return {"killed": {k: ", ".join(v) for k, v in found.items() if v}, "survived": survivors}


# ---------------------------------------------------------------------------------------- laws

LENGTHS = (7, 12)  # of two rows; the first is padded on the left
EPS = 0.05  # large, so that its place shows


@cache
def oracle() -> tuple[dict[str, Tensor], list[Tensor]]:
    """The weights of a small Qwen2, and the logits that transformers finds for each row alone."""
    model = tiny_qwen2(n_layer=4, rms_norm_eps=EPS)
    twin, idx = hf_twin(model), token_ids(2, 12)
    with torch.no_grad():
        rows = [idx[:1], idx[1:], idx[:1, -LENGTHS[0] :]]
        return model.state_dict(), [twin(row).logits[0] for row in rows]


def built(kind: str) -> Qwen2ForCausalLM:
    """The model as the code makes it now."""
    state, _ = oracle()
    model = tiny_qwen2(n_layer=4, rms_norm_eps=EPS)
    model.load_state_dict(state, strict=False)
    use_attention_(model, kind)
    return model


def near(found: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(found, want, atol=2e-4, rtol=0)


@torch.no_grad()
def full(kind: str) -> None:
    found, (_, rows) = built(kind)(token_ids(2, 12)), oracle()
    near(found, torch.stack(rows[:2]))


@torch.no_grad()
def left(kind: str) -> None:
    idx = token_ids(2, 12)
    mask = torch.tensor([[0] * (12 - n) + [1] * n for n in LENGTHS])
    found, (_, rows) = built(kind)(idx, positions=positions_from_mask(mask)), oracle()
    near(found[0, -LENGTHS[0] :], rows[2])
    near(found[1], rows[1])


@torch.no_grad()
def chunked(kind: str) -> None:
    found, (_, rows) = in_chunks(token_ids(2, 12), [5, 1, 3, 3], model=built(kind)), oracle()
    near(found, torch.stack(rows[:2]))


LAWS: Laws = {
    f"{law.__name__} {kind}": partial(law, kind)
    for law in (full, left, chunked)
    for kind in ("formula", "sdpa")
}

# ------------------------------------------------------------------- right code, written again


def rule(sees: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Visibility by positions alone."""

    def rule(self: Visibility, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        query = self.query_positions[:, None, queries, None]
        key = self.key_positions[:, None, None, keys]
        return sees(query, key)

    return rule


def weights(softmax: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """The formula of attention, given its softmax over the keys that are not hidden."""

    def weights(q: Tensor, k: Tensor, visibility: Visibility) -> Tensor:
        scores = q @ repeat_kv(k, q.shape[1]).mT / math.sqrt(q.shape[-1])
        return softmax(scores, ~visibility.mask)

    return weights


def masked(scores: Tensor, hidden: Tensor, dim: int = -1) -> Tensor:
    low = torch.finfo(scores.dtype).min
    return torch.softmax(scores.masked_fill(hidden, low), dim).masked_fill(hidden, 0.0)


def turn_keys(self: nn.Module, k: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    return self.rotate(k, *rotation)


def merge(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2)


def forward(
    split: Callable[[Tensor], Tensor] = lambda q: q.transpose(1, 2),
    turn_keys: Callable[..., Tensor] = turn_keys,
    merge: Callable[[Tensor], Tensor] = merge,
) -> Any:
    """Qwen2's attention, given how queries become heads, keys are turned, heads become features."""

    def forward(self: Any, x: Tensor, rotation: Any, visibility: Visibility, cache: Any) -> Tensor:
        B, T, _ = x.shape
        q = split(self.q_proj(x).view(B, T, -1, self.head_dim))
        k = self.k_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        k, v = cache.update(turn_keys(self, k, rotation), v)
        return self.o_proj(merge(self.attend(self.rotate(q, *rotation), k, v, visibility, 0.0)))

    return forward


def norm(scale: Callable[[Tensor, float], Tensor], centre: bool = False) -> Any:
    """RMSNorm, given what each row is multiplied by."""

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if centre else x
        return x * scale(x.square(), eps) * weight

    return norm


def root(square: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(square.mean(-1, keepdim=True) + eps)


def block(self: Any, x: Tensor, *how: Any) -> Tensor:
    x = x + self.self_attn(self.input_layernorm(x), *how)
    return x + self.mlp(self.post_attention_layernorm(x))


VISIBLE, FORMULA = "attention.visibility:Visibility", "attention.attention:attention_weights"
ATTENTION, NORM = "models.qwen2:Attention.forward", "layers.norm:fast_rms_norm"
ROPE, FUSED = "models.qwen2:apply_rope", "attention.sdpa:F.scaled_dot_product_attention"

SAME = [
    Mutant("the rule", f"{VISIBLE}.rule", rule(lambda q, k: (k >= 0) & (k <= q))),
    Mutant("the formula", FORMULA, weights(masked)),
    Mutant("attention", ATTENTION, forward()),
    Mutant("RMSNorm", NORM, norm(root)),
    Mutant("a block", "models.qwen2:Block.forward", block),
    Mutant("places", "cache.kv:place", lambda x, given, start: place(x, given, start)),
    Mutant("rotation", ROPE, lambda x, cos, sin: apply_rope(x, cos, sin)),
]

# ------------------------------------------------------------------------------------ mistakes

fused = F.scaled_dot_product_attention


def triangle(query: Tensor, key: Tensor) -> Tensor:
    return (key >= 0) & torch.ones(query.shape[2], key.shape[3]).tril().bool()


def multiplied(scores: Tensor, hidden: Tensor) -> Tensor:
    return torch.softmax(scores + hidden * -torch.inf, -1).masked_fill(hidden, 0.0)


def filled(scores: Tensor, hidden: Tensor) -> Tensor:
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)


def local_keys(self: nn.Module, k: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    positions = torch.arange(k.shape[2])[None]
    return apply_rope(k, *RotaryEmbedding(self.head_dim)(positions, k.dtype))


def block_normed_after(self: Any, x: Tensor, *how: Any) -> Tensor:
    x = self.input_layernorm(x + self.self_attn(x, *how))
    return x + self.mlp(self.post_attention_layernorm(x))


def without_last_norm(self: Any, config: Any, init: Any = Qwen2Model.__init__) -> None:
    init(self, config)
    self.norm = nn.Identity()


MUTANTS = [
    Mutant("a query does not see itself", f"{VISIBLE}.rule", rule(lambda q, k: (k >= 0) & (k < q))),
    Mutant("triangle only, positions not compared", f"{VISIBLE}.rule", rule(triangle)),
    Mutant("padding inverted", f"{VISIBLE}.rule", rule(lambda q, k: (k < 0) & (k <= q))),
    Mutant("padding seen", f"{VISIBLE}.rule", rule(lambda q, k: (k >= -1) & (k <= q))),
    Mutant(
        "is_causal with a cache", f"{VISIBLE}.is_causal",
        property(lambda self: self.hides_only_the_future),
    ),
    Mutant("-inf by multiplication", FORMULA, weights(multiplied)),
    Mutant("-inf by filling", FORMULA, weights(filled)),
    Mutant("softmax over the queries", FORMULA, weights(partial(masked, dim=-2))),
    Mutant("no 1/sqrt(D)", FUSED, lambda *qkv, **how: fused(*qkv, scale=1.0, **how)),
    Mutant(
        "1/sqrt(C)", FUSED,
        lambda q, *kv, **how: fused(q, *kv, scale=(q.shape[1] * q.shape[3]) ** -0.5, **how),
    ),
    Mutant(
        "key heads tiled", "attention.attention:repeat_kv",
        lambda x, n_head: x.repeat(1, n_head // x.shape[1], 1, 1),
    ),
    Mutant(
        "positions restart after a cache", "cache.kv:place",
        lambda x, positions, start: place(x, positions, 0),
    ),
    Mutant("keys turned by local positions", ATTENTION, forward(turn_keys=local_keys)),
    Mutant("rotation of queries alone", ATTENTION, forward(turn_keys=lambda self, k, _: k)),
    Mutant(
        "heads split without transpose", ATTENTION,
        forward(split=lambda q: q.reshape(q.shape[0], q.shape[2], q.shape[1], q.shape[3])),
    ),
    Mutant(
        "heads merged without transpose", ATTENTION,
        forward(merge=lambda y: y.reshape(y.shape[0], y.shape[2], -1)),
    ),
    Mutant("rotation backwards", ROPE, lambda x, cos, sin: apply_rope(x, cos, -sin)),
    Mutant("rotation of interleaved pairs", ROPE, apply_rope_interleaved),
    Mutant("RMSNorm subtracts the mean", NORM, norm(root, centre=True)),
    Mutant(
        "RMSNorm sums", NORM,
        norm(lambda square, eps: torch.rsqrt(square.sum(-1, keepdim=True) + eps)),
    ),
    Mutant(
        "eps outside the root", NORM,
        norm(lambda square, eps: 1 / (square.mean(-1, keepdim=True).sqrt() + eps)),
    ),
    Mutant(
        "gate and up swapped", "layers.gated_mlp:GatedMLP.forward",
        lambda self, x: self.down_proj(self.product(self.up_proj(x), self.gate_proj(x))),
    ),
    Mutant("norm after the sum", "models.qwen2:Block.forward", block_normed_after),
    Mutant("no last norm", "models.qwen2:Qwen2Model.__init__", without_last_norm),
]  # fmt: skip

#: Two mistakes of the historic list have no counterpart: a mask one column too wide that was cut
#: to size later, and a triangle that was drawn for one query too. Masks here are made from
#: positions, in their exact size.
SURVIVORS: dict[str, str] = {}


def prove() -> dict[str, Any]:
    """Every mistake with the laws that find it."""
    oracle()
    return judged([(m, LAWS) for m in SAME], [(m, LAWS) for m in MUTANTS], SURVIVORS)


def show(found: dict[str, Any]) -> None:
    for label, by in found["killed"].items():
        print(f"{label:50}{by}")
    for label, reason in found["survived"].items():
        print(f"{label:50}SURVIVED: {reason}")
    print(f"{len(found['killed'])} killed, {len(found['survived'])} survived")


if __name__ == "__main__":
    show(prove())
