"""Places in a model whose numbers can be read and replaced while it runs.

A transformer is one stream of states (B, T, C), to which every block adds twice: what its attention
fetched from other tokens, and what its MLP made of each token. A :class:`Site` names one of these
numbers::

    Site("stream", l)     what enters block l; for l = L, what enters the final norm   (B, T, C)
    Site("attention", l)  what the attention of block l makes                          (B, T, C)
    Site("mlp", l)        what the MLP of block l makes                                (B, T, C)
    Site("heads", l)      what each head of block l fetched, before they are mixed (B, H, T, D)

In a Qwen2 or GPT-2 the stream that enters block l + 1 is the sum of the stream, the attention and
the MLP of block l. (Gemma norms what they make before it is added; in a model of several
residual streams, like DeepSeek-V4, they all enter a block, and one enters the final norm.)

:func:`edited` runs a model with functions applied at some sites; to read is to apply one that looks
and changes nothing. It replaces what a built model calls and puts it back afterwards, as everything
here that changes a model's computation does.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lm_from_scratch.attention.layer import AttentionLayer
from lm_from_scratch.layers.recurrent import RecurrentLayer
from lm_from_scratch.models.blocks import blocks, final_norm, has
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.models.modes import evaluating

PARTS = ("stream", "attention", "mlp", "heads")


class Site(NamedTuple):
    """A part of a block, and the number of the block, from 0."""

    part: str
    layer: int


#: From the numbers at a site to those that the model goes on with, of the same shape.
Edit = Callable[[Tensor], Tensor]


@contextmanager
def edited(model: nn.Module, edits: Mapping[Site, Edit]) -> Iterator[None]:
    """Inside the ``with`` block, ``model`` computes with these functions applied at their sites.

    Blocks may be nested: a part is read as the outer edits have made it, and a stream as it is
    before an outer edit of that same stream. Raises ``ValueError`` for a site that the model does
    not have.
    """
    with ExitStack() as undo:
        for site, edit in edits.items():
            module, name, function = _at(model, site, edit)
            undo.enter_context(_replaced(module, name, function))
        yield


def activations(
    model: CausalLM, idx: Tensor, sites: Iterable[Site], **places: Tensor
) -> tuple[Tensor, dict[Site, Tensor]]:
    """The logits (B, T, V) of ``model`` for ``idx`` (B, T), and the numbers at ``sites``. What else
    the model takes (``positions``) goes by name."""
    kept: dict[Site, Tensor] = {}

    def keeping(site: Site) -> Edit:
        def keep(x: Tensor) -> Tensor:
            kept[site] = x.detach()
            return x

        return keep

    with evaluating(model), edited(model, {site: keeping(site) for site in sites}):
        logits = model(idx, **places)
    return logits, kept


def stream_sites(model: nn.Module) -> list[Site]:
    """The stream of a model of L blocks: L + 1 sites, from the embeddings to the final norm."""
    return [Site("stream", layer) for layer in range(len(blocks(model)) + 1)]


def one_stream(model: CausalLM) -> None:
    """Raises ``ValueError`` for a model of several residual streams, whose "stream" is not
    (B, T, C)."""
    if hasattr(model.config, "hc_mult"):
        raise ValueError(f"{type(model).__name__} has several residual streams, not one")


def wide(x: Tensor) -> Tensor:
    """``x`` (...,) without its history, in float32 at least: something is to be fitted to it."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _at(model: nn.Module, site: Site, edit: Edit) -> tuple[nn.Module, str, Any]:
    """The module whose attribute is to be replaced for an edit at a site, the name of the
    attribute, and the function that takes its place."""
    layers = blocks(model)
    part, layer = site
    if part not in PARTS:
        raise ValueError(f"part={part!r} must be one of {', '.join(PARTS)}")
    last = len(layers) if part == "stream" else len(layers) - 1
    if type(layer) is not int or not 0 <= layer <= last:
        raise ValueError(f"layer={layer!r} of {part!r} must be an integer from 0 to {last}")
    if part == "stream":
        module = layers[layer] if layer < len(layers) else final_norm(model)
        forward = module.forward
        return module, "forward", lambda x, *rest, **named: forward(edit(x), *rest, **named)
    children = list(layers[layer].children())
    mixers = [child for child in children if has(child, (AttentionLayer, RecurrentLayer))]
    if part == "heads":
        heads = [m for m in mixers[0].modules() if isinstance(m, AttentionLayer)]
        if not heads:
            raise ValueError(f"block {layer} has no heads: {type(mixers[0]).__name__} has a state")
        attend = heads[0].attend
        return heads[0], "attend", lambda *args, **named: edit(attend(*args, **named))
    module = mixers[0] if part == "attention" else layers[layer].mlp  # type: ignore[assignment]
    forward = module.forward
    return module, "forward", lambda *args, **named: edit(forward(*args, **named))


@contextmanager
def _replaced(module: nn.Module, name: str, function: Any) -> Iterator[None]:
    """Inside the ``with`` block the attribute of the module is this function."""
    own, original = name in vars(module), getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        if own:
            setattr(module, name, original)
        else:
            delattr(module, name)
