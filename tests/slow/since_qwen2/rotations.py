"""Layers without positions, and heads of which a part turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from since_qwen2.whole_models import (
    ROWS,
    Ideas,
    Laws,
    Rows,
    built,
    exact,
    first,
    near,
    whole,
)
from tiny_models import enlarge_, ours_from_hf
from torch import Tensor

from lm_from_scratch.checkpoint import dialects
from lm_from_scratch.layers.rope import (
    RotaryEmbedding,
    apply_rope,
    apply_rope_interleaved,
    rotation,
)

# --------------------------------------------------------------------------------------------- laws


@torch.no_grad()
def moved(name: str) -> None:
    """A text at other places has the same logits: only distances count. In float64."""
    model, idx = built(name).double(), torch.tensor(ROWS[:1])
    places = torch.arange(12)[None]
    exact(model(idx, positions=places + 1000), model(idx, positions=places))


@cache
def published() -> tuple[Any, Tensor]:
    """A SmolLM3 of transformers, whose file says layer by layer which rotate, and its logits."""
    from transformers import AutoConfig
    from transformers import AutoModelForCausalLM as HFModel

    sizes = dict(
        vocab_size=97,
        hidden_size=24,
        intermediate_size=28,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        no_rope_layers=[1, 0, 0, 1],
    )
    twin = HFModel.from_config(AutoConfig.for_model("smollm3", **sizes)).eval()
    enlarge_(twin)
    return twin, twin(torch.tensor(ROWS[:1])).logits.detach()


@torch.no_grad()
def folder() -> None:
    near(ours_from_hf(published()[0])(torch.tensor(ROWS[:1])), published()[1])


NOPE_LAWS: Laws = whole("smollm3") | {"moved": partial(moved, "smollm3"), "folder": folder}
PARTIAL_LAWS: Laws = whole("partial") | {"moved": partial(moved, "partial")}

# ----------------------------------------------------------------------------------------- mistakes


def partial_rope(
    part: Callable[[Tensor, int], Any] = lambda x, R: x.tensor_split([R], dim=-1),
    turn: Any = apply_rope,
    join: Callable[[Tensor, Tensor], list[Tensor]] = lambda turned, rest: [turned, rest],
) -> Any:
    """A rotation of R features, given which these are and how they pair."""

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = part(x, 2 * cos.shape[-1])
        return torch.cat(join(turn(turned, cos, sin), rest), dim=-1)

    return rotate


def pairs_of_the_head(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Features i and i + D / 2."""
    more = x.shape[-1] // 2 - cos.shape[-1]
    return apply_rope(x, F.pad(cos, (0, more), value=1.0), F.pad(sin, (0, more)))


class WholeHead(RotaryEmbedding):
    """The first angles of a head all of whose features turn."""

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        inv_freq = self.theta ** -(torch.arange(0, self.head_dim, 2) / 16)
        return rotation(positions, inv_freq.to(torch.promote_types(dtype, torch.float32)))


def rounded(positions: Tensor, inv_freq: Tensor, factor: float = 1.0) -> tuple[Tensor, ...]:
    turned = rotation(positions, inv_freq, factor)
    return tuple(x.bfloat16().to(x.dtype) for x in turned)


def inverted(config: Any, read: Any = dialects.DIALECTS["smollm3"].layers) -> dict[str, Any]:
    found = read(config)
    return found | {"rope_layers": tuple(1 - n for n in found["rope_layers"])}


INVERTED = dialects.DIALECTS | {"smollm3": replace(dialects.DIALECTS["smollm3"], layers=inverted)}


def some_heads(heads: slice) -> Any:
    """In a layer without positions, some of 6 heads of queries and 2 of keys turn all the same."""

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.clone()
        x[:, heads] = apply_rope(x[:, heads], cos, sin)
        return x

    return rotate


NOPE, PARTIAL = "models.smollm3:unrotated", "models.qwen3_next:apply_partial_rope"
EVERY, ROTATION = "models.smollm3:all_but_every", "layers.rope:rotation"
NOPE_SAME: Rows = [
    ("no rotation is one to position 0", NOPE, lambda x, c, s: apply_rope(x, c * 0 + 1, s * 0)),
    (
        "every fourth layer",
        EVERY,
        lambda n, layers: tuple(int(i % n != n - 1) for i in range(layers)),
    ),
]
NOPES: Rows = [
    ("all layers turn", NOPE, apply_rope),
    ("queries turn, keys do not", NOPE, some_heads(slice(0, 6))),
    ("keys turn, queries do not", NOPE, some_heads(slice(6, 8))),
    ("no layer turns", "models.qwen2:apply_rope", first),
    (
        "every fourth layer counted from 0",
        EVERY,
        lambda n, layers: tuple(int(i % n != 0) for i in range(layers)),
    ),
    (
        "every fourth layer turns",
        EVERY,
        lambda n, layers: tuple(int(i % n == n - 1) for i in range(layers)),
    ),
    ("a 1 in no_rope_layers is one without", "checkpoint.configs:DIALECTS", INVERTED),
    ("backwards", ROTATION, lambda p, f, factor=1.0: (rotation(p, f)[0], -rotation(p, f)[1])),
    ("positions squared", ROTATION, lambda p, f, factor=1.0: rotation(p.square(), f)),
]
PARTIAL_SAME: Rows = [
    ("a part of the features", PARTIAL, partial_rope()),
    (
        "another order of features",
        PARTIAL,
        partial_rope(join=lambda turned, rest: [rest, turned]),
    ),
]
PARTIALS: Rows = [
    (
        "the last features turn",
        PARTIAL,
        partial_rope(
            lambda x, R: x.tensor_split([x.shape[-1] - R], -1)[::-1],
            join=lambda turned, rest: [rest, turned],
        ),
    ),
    (
        "all features turn",
        PARTIAL,
        lambda x, cos, sin: apply_rope(x, *(t.repeat_interleave(4, -1) for t in (cos, sin))),
    ),
    ("no feature turns", PARTIAL, first),
    ("pairs i and i + D / 2", PARTIAL, pairs_of_the_head),
    ("pairs 2i and 2i + 1", PARTIAL, partial_rope(turn=apply_rope_interleaved)),
    ("the rest is lost", PARTIAL, partial_rope(join=lambda turned, rest: [turned, 0 * rest])),
    ("exponents over D, not R", "models.qwen3_next:RotaryEmbedding", WholeHead),
    ("cosines in 16 bits", ROTATION, rounded),
]


IDEAS: Ideas = {
    "NoPE": (NOPE_LAWS, NOPE_SAME, NOPES),
    "partial RoPE": (PARTIAL_LAWS, PARTIAL_SAME, PARTIALS),
}
