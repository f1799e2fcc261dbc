"""Looking inside a built model: attention weights, hidden states, and what autograd keeps.

Nothing in a model file knows of this. A recorder wraps what is there for as long as a ``with``
block lasts, and the model's results stay the same.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lm_from_scratch.attention.attention import attention_weights
from lm_from_scratch.attention.gqa import repeat_kv
from lm_from_scratch.attention.kinds import attention_layers
from lm_from_scratch.attention.layer import AttentionFunction
from lm_from_scratch.attention.sinks import SinkLayer
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.models.blocks import blocks, final_norm


@contextmanager
def record_attention(model: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Record the attention weights of every forward pass of a built model.

    Yields one list per layer; each forward appends its weights (B, H, T, S), detached (so does the
    second run of a checkpointed block). The layer's result is unchanged, whichever attention kind
    it uses. Where a layer has sinks, its rows sum to less than 1::

        with record_attention(model) as maps:
            model(idx)
        maps[3][0]  # layer 3, first forward: (B, H, T, S)
    """

    def weights(layer: Any, q: Tensor, k: Tensor, visibility: Visibility) -> Tensor:
        if isinstance(layer, SinkLayer):  # a sink takes a part of the weights
            return layer.weigh(q, k, visibility)
        return attention_weights(q, k, visibility)

    with _recorded(model, weights) as maps:
        yield maps


@contextmanager
def record_scores(model: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Record what goes into softmax, like :func:`record_attention`: the scores (B, H, T, S), and
    minus infinity where a key is hidden."""

    def scores(layer: Any, q: Tensor, k: Tensor, visibility: Visibility) -> Tensor:
        scores = q @ repeat_kv(k, q.shape[1]).mT / math.sqrt(q.shape[-1])
        return scores.masked_fill(~visibility.mask, -math.inf)

    with _recorded(model, scores) as maps:
        yield maps


@contextmanager
def _recorded(
    model: nn.Module, look: Callable[[Any, Tensor, Tensor, Visibility], Tensor]
) -> Iterator[list[list[Tensor]]]:
    """What ``look`` makes of the queries and keys of every forward pass: a list per layer."""
    layers = attention_layers(model)
    records: list[list[Tensor]] = [[] for _ in layers]
    originals = [layer.attend for layer in layers]

    def recording(layer: Any, attend: AttentionFunction, own: list[Tensor]) -> AttentionFunction:
        def wrapped(
            q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, dropout: float = 0.0
        ) -> Tensor:
            with torch.no_grad():
                own.append(look(layer, q, k, visibility))
            return attend(q, k, v, visibility, dropout)

        return wrapped

    for layer, attend, own in zip(layers, originals, records, strict=True):
        layer.attend = recording(layer, attend, own)
    try:
        yield records
    finally:
        for layer, attend in zip(layers, originals, strict=True):
            layer.attend = attend


@contextmanager
def record_hidden_states(model: nn.Module, detach: bool = True) -> Iterator[list[list[Tensor]]]:
    """Record the hidden states (B, T, C) of every forward pass of a built model.

    Yields L + 2 lists: the embeddings, what each of the L blocks returns, and the last of these
    after the final norm. (``transformers`` returns L + 1: the output of the last block before the
    norm is missing there.) Each forward appends one state to every list, detached unless gradients
    are to flow through it (``detach=False``)::

        with record_hidden_states(model) as states:
            model(idx)
        states[3][0]  # after three blocks, first forward
    """
    layers = blocks(model)
    states: list[list[Tensor]] = [[] for _ in range(len(layers) + 2)]

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        states[0].append(args[0].detach() if detach else args[0])

    def after(own: list[Tensor]) -> Any:
        return lambda module, args, out: own.append(out.detach() if detach else out)

    handles = [layers[0].register_forward_pre_hook(before)]
    for module, own in zip([*layers, final_norm(model)], states[1:], strict=True):
        handles.append(module.register_forward_hook(after(own)))
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record_saved(*modules: nn.Module) -> Iterator[dict[int, int]]:
    """Inside the ``with`` block: the bytes of each storage that autograd keeps for backward.

    A storage counts once, however many tensors share it. Those of the parameters of ``modules``
    do not count, because they are there anyway. ``sum(saved.values())`` is the total.
    """
    parameters = [p for module in modules for p in module.parameters()]
    own = {p.untyped_storage()._cdata for p in parameters}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
