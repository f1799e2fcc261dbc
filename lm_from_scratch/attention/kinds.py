"""The kinds of attention by name, and how one is put into a built model."""

from torch import nn

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.flex import flex_attention
from lm_from_scratch.attention.layer import AttentionFunction, AttentionLayer
from lm_from_scratch.attention.online_softmax import tiled_attention
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.sinks import SINK_KINDS, SinkLayer
from lm_from_scratch.attention.varlen import packed_attention

#: The kinds by name.
ATTENTION_KINDS: dict[str, AttentionFunction] = {
    "formula": formula_attention,
    "sdpa": sdpa_attention,
    "tiled": tiled_attention,
    "flex": flex_attention,
    "packed": packed_attention,
}


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """The attention layers of a built model, in order.

    Raises ``ValueError`` if there are none.
    """
    layers = [module for module in model.modules() if isinstance(module, AttentionLayer)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention layer")
    return layers


def use_attention_(model: nn.Module, kind: str) -> None:
    """Make every attention layer of a built model compute with the named kind.

    A layer with sinks keeps them, and computes with the function of that name in ``SINK_KINDS``.

    Raises ``ValueError`` for a name that is not in :data:`ATTENTION_KINDS`, and for one that is not
    there for a layer with sinks.
    """
    if kind not in ATTENTION_KINDS:
        raise ValueError(f"attention kind {kind!r} is not one of {sorted(ATTENTION_KINDS)}")
    layers = attention_layers(model)
    if kind not in SINK_KINDS and any(isinstance(layer, SinkLayer) for layer in layers):
        raise ValueError(f"attention kind {kind!r} has no sinks, only {sorted(SINK_KINDS)}")
    for layer in layers:
        if isinstance(layer, SinkLayer):
            layer.compute = SINK_KINDS[kind]
        else:
            layer.attend = ATTENTION_KINDS[kind]
