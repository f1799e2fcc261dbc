"""Looking inside a built model: attention weights and hidden states of every layer.

Nothing in a model file knows of this. A recorder wraps what is there for as long as a ``with``
block lasts, and the model's results stay the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lm_from_scratch.attention import AttentionFunction, attention_layers, attention_weights
from lm_from_scratch.visibility import Visibility


@contextmanager
def record_attention(model: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Record the attention weights of every forward pass of a built model.

    Yields one list per layer; each forward appends its weights (B, H, T, S), detached. The layer's
    result is unchanged, whichever attention kind it uses::

        with record_attention(model) as maps:
            model(idx)
        maps[3][0]  # layer 3, first forward: (B, H, T, S)
    """
    layers = attention_layers(model)
    maps: list[list[Tensor]] = [[] for _ in layers]
    originals = [layer.attend for layer in layers]

    def recording(attend: AttentionFunction, weights: list[Tensor]) -> AttentionFunction:
        def wrapped(
            q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, dropout: float = 0.0
        ) -> Tensor:
            with torch.no_grad():
                weights.append(attention_weights(q, k, visibility))
            return attend(q, k, v, visibility, dropout)

        return wrapped

    for layer, attend, weights in zip(layers, originals, maps, strict=True):
        layer.attend = recording(attend, weights)
    try:
        yield maps
    finally:
        for layer, attend in zip(layers, originals, strict=True):
            layer.attend = attend
