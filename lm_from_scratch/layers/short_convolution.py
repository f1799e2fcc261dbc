r"""A short causal convolution: each feature is a weighted sum of its own last few values.

.. math::

   y_{t,c} = \sum_{j=0}^{K-1} w_{c,j} \, x_{t - (K - 1) + j,\, c}

With K = 4 a token sees itself and the three before it, feature by feature (*depthwise*). A
recurrent layer has one in front of its keys, so that a key can say "the token after *the*", which a
single token cannot. Its state is the last K - 1 inputs.

Shapes: B batch, T tokens, C features, K taps.

Source: Dao, Gu, *Mamba*, 2023, arXiv:2312.00752, and the models since.
"""

import torch
from torch import Tensor


def short_convolution(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The sums (B, T, C) of ``x`` (B, T, C) with ``weight`` (C, K), after the K - 1 inputs in
    ``state`` (B, K - 1, C); and the state after them.

    ``positions`` (B, T) say where padding stands, with -1: it is skipped, so that each token sees
    the real ones before it. What stands at padding is not defined. ``documents`` (B, T), of a row
    that begins here, are kept apart.
    """
    (_, T, _), K = x.shape, weight.shape[1]
    if positions is None and documents is None:
        inputs = torch.cat([state, x], dim=1)  # (B, K - 1 + T, C)
        y = sum(inputs[:, j : j + T] * weight[:, j] for j in range(K))
        return y, inputs[:, T:]  # type: ignore[return-value]
    assert positions is not None
    padding = positions < 0
    order = padding.int().argsort(dim=1, stable=True)  # (B, T): real tokens first
    inputs = torch.cat([state, x.take_along_dim(order[..., None], dim=1)], dim=1)
    taps = [inputs[:, j : j + T] * weight[:, j] for j in range(K)]
    if documents is not None:
        own = documents.gather(1, order)
        past = torch.cat([own[:, :1].expand(-1, K - 1), own], dim=1)  # the state is empty there
        taps = [tap * (past[:, j : j + T] == own)[..., None] for j, tap in enumerate(taps)]
    y = torch.stack(taps).sum(dim=0)
    last = (~padding).sum(dim=1, keepdim=True) + torch.arange(K - 1, device=x.device)  # (B, K - 1)
    back = order.argsort(dim=1)[..., None]
    return y.take_along_dim(back, dim=1), inputs.take_along_dim(last[..., None], dim=1)
