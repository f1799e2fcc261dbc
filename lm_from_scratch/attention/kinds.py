"""The kinds of attention by name, and how one is put into a built model."""

from typing import Any

from torch import nn

from lm_from_scratch.attention.attention import (
    AttentionFunction,
    formula_attention,
    sdpa_attention,
)
from lm_from_scratch.attention.flex import flex_attention
from lm_from_scratch.attention.online_softmax import tiled_attention
from lm_from_scratch.attention.varlen import packed_attention

#: The kinds by name.
ATTENTION_KINDS: dict[str, AttentionFunction] = {
    "formula": formula_attention,
    "sdpa": sdpa_attention,
    "tiled": tiled_attention,
    "flex": flex_attention,
    "packed": packed_attention,
}


def attention_layers(model: nn.Module) -> list[Any]:
    """The attention modules of a built model, in order: those with an ``attend`` function.

    Raises ``ValueError`` if there are none.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "attend")]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention layer (no module with `attend`)")
    return layers


def use_attention_(model: nn.Module, kind: str) -> None:
    """Make every attention layer of a built model compute with the named kind.

    Raises ``ValueError`` for a name that is not in :data:`ATTENTION_KINDS`.
    """
    if kind not in ATTENTION_KINDS:
        raise ValueError(f"attention kind {kind!r} is not one of {sorted(ATTENTION_KINDS)}")
    for layer in attention_layers(model):
        layer.attend = ATTENTION_KINDS[kind]
