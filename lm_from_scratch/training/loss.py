r"""The language-model loss: how surprised the model is by the token that came next.

.. math::

   \mathcal{L} = -\frac{1}{N} \sum_{t} \log p(x_{t+1} \mid x_{\le t})

in nats, over the N tokens that have a real successor. A model that knows nothing scores
:math:`\log V`; :math:`e^{\mathcal{L}}` is the perplexity.

The logits (N, V) are often the largest tensor of a training step. :func:`chunked_causal_lm_loss`
gives the same loss and gradients without ever holding them.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm_from_scratch.text.targets import IGNORE


def causal_lm_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of ``logits`` (B, T, V) over the ``targets`` (B, T) that are not -100.

    The result is 0 (with a gradient of 0), not NaN, if no target counts. Low-precision logits are
    cast up to float32. Raises ``ValueError`` for other shapes.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}, targets {tuple(targets.shape)}; "
            "all but the last dimension of the logits must agree"
        )
    work = torch.promote_types(logits.dtype, torch.float32)
    total = F.cross_entropy(
        logits.flatten(0, -2).to(work),
        targets.flatten().long(),
        ignore_index=IGNORE,
        reduction="sum",
    )
    return total / (targets != IGNORE).sum().clamp(min=1)


def chunked_causal_lm_loss(x: Tensor, weight: Tensor, targets: Tensor, chunk: int = 1024) -> Tensor:
    r"""``causal_lm_loss(F.linear(x, weight), targets)`` without holding the logits (N, V).

    ``x`` (B, T, C) are hidden states, ``weight`` (V, C) the head, ``targets`` (B, T) token ids. For
    one token with state :math:`x`, target y and logits :math:`z = W x`,

    .. math::

       \mathcal{L} = \log \sum_j e^{z_j} - z_y, \qquad
       \frac{\partial \mathcal{L}}{\partial z_j} = \mathrm{softmax}(z)_j - [j = y]

    The sum runs over the vocabulary, and so may be taken ``chunk`` rows of W at a time: the log-sum
    of two chunks together is the ``logaddexp`` of their log-sums. Backward computes the logits of
    each chunk again; with their gradient :math:`G` (N, chunk), :math:`G W` is the chunk's share of
    the gradient of x, and :math:`G^\top x` is the gradient of its rows of W. Tokens whose target is
    -100 are left out from the start. Raises ``ValueError`` for other shapes, targets outside the
    vocabulary, and a ``chunk`` below 1.

    Sources: Milakov, Gimelshein, *Online normalizer calculation for softmax*, 2018,
    arXiv:1805.02867; Wijmans et al., *Cut Your Losses in Large-Vocabulary Language Models*, 2024,
    arXiv:2411.09009.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1")
    if x.shape[:-1] != targets.shape or weight.shape[1:] != x.shape[-1:]:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, weight {tuple(weight.shape)}, targets "
            f"{tuple(targets.shape)}; they must be (..., C), (V, C) and (...)"
        )
    counts = targets != IGNORE
    x, targets = x[counts], targets[counts]  # (N, C) and (N,)
    if len(targets) and not 0 <= targets.min() <= targets.max() < len(weight):
        raise ValueError(
            f"targets run from {targets.min()} to {targets.max()}; they must be below the "
            f"{len(weight)} rows of the weight, and not negative"
        )
    # autocast may ask for products in bfloat16
    dtype = F.linear(x[:0], weight[:0]).dtype
    total = _ChunkedCrossEntropy.apply(x.to(dtype), weight, targets, chunk)
    return total / max(len(targets), 1)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of the cross-entropies of N tokens; products in the dtype of x, sums in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        work = torch.promote_types(x.dtype, torch.float32)
        log_sum = torch.full_like(x[:, 0], -torch.inf, dtype=work)  # (N,)
        target_logit = torch.zeros_like(log_sum)
        for _, _, logits, hits in _logits_in_chunks(x, weight, targets, chunk):
            log_sum = torch.logaddexp(log_sum, logits.logsumexp(dim=1))
            target_logit[hits[0]] = logits[hits]
        ctx.save_for_backward(x, weight, targets, log_sum)
        ctx.chunk = chunk
        return (log_sum - target_logit).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, targets, log_sum = ctx.saved_tensors
        grad_x = torch.zeros_like(x, dtype=log_sum.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for rows, W, logits, hits in _logits_in_chunks(x, weight, targets, ctx.chunk):
            dlogits = logits.sub_(log_sum[:, None]).exp_()  # the softmax
            dlogits[hits] -= 1.0
            dlogits = dlogits.mul_(grad).to(x.dtype)
            if grad_x is not None:
                grad_x += dlogits @ W
            if grad_weight is not None:
                grad_weight[rows] = dlogits.T @ x
        return grad_x if grad_x is None else grad_x.to(x.dtype), grad_weight, None, None


def _logits_in_chunks(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int
) -> Iterator[tuple[slice, Tensor, Tensor, tuple[Tensor, Tensor]]]:
    """For each chunk of the vocabulary: its rows of W, as a slice and as a matrix; the logits
    (N, chunk); and where among these the logits of targets stand."""
    for start in range(0, len(weight), chunk):
        rows = slice(start, start + chunk)
        W = weight[rows].to(x.dtype)
        tokens = ((targets >= start) & (targets < start + chunk)).nonzero().squeeze(1)
        logits = (x @ W.T).to(torch.promote_types(x.dtype, torch.float32))
        yield rows, W, logits, (tokens, targets[tokens] - start)
