r"""The language-model loss: how surprised the model is by the token that came next.

.. math::

   \mathcal{L} = -\frac{1}{N} \sum_{t} \log p(x_{t+1} \mid x_{\le t})

in nats, over the N tokens that have a real successor. A model that knows nothing scores
:math:`\log V`; :math:`e^{\mathcal{L}}` is the perplexity.

The logits (N, V) are often the largest tensor of a training step. :func:`chunked_causal_lm_loss`
gives the same loss and gradients without ever holding them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm_from_scratch.cache.interface import known
from lm_from_scratch.text.targets import IGNORE


def causal_lm_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of ``logits`` (B, T, V) over the ``targets`` (B, T) that are not -100.

    The result is 0 (with a gradient of 0), not NaN, if no target counts; logits of ignored targets
    may be anything. Low-precision logits are cast up to float32. Raises ``ValueError`` for other
    shapes.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}, targets {tuple(targets.shape)}; "
            "all but the last dimension of the logits must agree"
        )
    counts = targets != IGNORE
    # ignore_index alone gives NaN as the gradient of ignored logits that are all -inf
    ignored = known((~counts).any(), otherwise=-1)
    if ignored == -1:
        logits = logits.masked_fill(~counts[..., None], 0.0)
    elif ignored:
        logits, targets = logits[counts], targets[counts]
    work = torch.promote_types(logits.dtype, torch.float32)
    total = F.cross_entropy(
        logits.flatten(0, -2).to(work),
        targets.flatten().long(),
        ignore_index=IGNORE,
        reduction="sum",
    )
    return total / counts.sum().clamp(min=1)


def chunked_causal_lm_loss(x: Tensor, weight: Tensor, targets: Tensor, chunk: int = 256) -> Tensor:
    r"""``causal_lm_loss(F.linear(x, weight), targets)`` without holding the logits (N, V).

    ``x`` (B, T, C) are hidden states, ``weight`` (V, C) the head, ``targets`` (B, T) token ids. For
    one of the N tokens that count, with state :math:`x`, target y and logits :math:`z = W x`,

    .. math::

       \mathcal{L} = \log \sum_j e^{z_j} - z_y, \qquad
       \frac{\partial \mathcal{L}}{\partial z_j} = \mathrm{softmax}(z)_j - [j = y]

    No token needs the logits of another one, and the gradient of z needs nothing that z does not
    say. So ``chunk`` tokens at a time give their logits, their loss, and at once the gradient
    :math:`G` (chunk, V) of their logits, with :math:`G W` for their states and their share
    :math:`G^\top x` of the gradient of W; the logits are then gone. Backward finds both gradients
    finished. Where none is wanted, only the loss is computed. Tokens whose target is -100 are left
    out from the start. Raises ``ValueError`` for other shapes, targets outside the vocabulary, and
    a ``chunk`` below 1.

    Sources: Wijmans et al., *Cut Your Losses in Large-Vocabulary Language Models*, 2024,
    arXiv:2411.09009; Hsu et al., *Liger Kernel: Efficient Triton Kernels for LLM Training*, 2024,
    arXiv:2410.10989 (the gradient in the forward pass).
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
    if not torch.is_grad_enabled():
        x, weight = x.detach(), weight.detach()
    # autocast may ask for products in bfloat16
    dtype = F.linear(x[:0], weight[:0]).dtype
    return _ChunkedCrossEntropy.apply(x.to(dtype), weight, targets, chunk)


#: Rows of W whose gradient is added up at once: their product stays in a processor's cache.
ROWS = 4096


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of N tokens; products in the dtype of x, sums in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        of_x, of_weight = ctx.needs_input_grad[:2]
        work, share = torch.promote_types(x.dtype, torch.float32), 1 / max(len(x), 1)
        W = weight[:].to(x.dtype)  # a slice of a quantised weight is decoded
        loss = x.new_zeros((), dtype=work)
        grad_x = torch.empty_like(x) if of_x else None
        grad_weight = torch.zeros_like(weight, dtype=work) if of_weight else None
        memory = x.new_empty(min(chunk, len(x)), len(W))  # for one chunk after another
        for start in range(0, len(x), chunk):
            x_, y = x[start : start + chunk], targets[start : start + chunk]
            hits = torch.arange(len(y), device=y.device), y
            logits = torch.mm(x_, W.T, out=memory[: len(y)])
            z = logits.to(work)  # in float32 the same memory
            z -= z.amax(dim=1, keepdim=True)
            z_target = z[hits]
            total = z.exp_().sum(dim=1)
            loss += share * (total.log() - z_target).sum()
            if not (of_x or of_weight):
                continue
            z /= total[:, None]  # the softmax
            z[hits] -= 1.0
            dlogits = logits.copy_(z)
            del z  # in bfloat16 twice as large as what is still needed
            if grad_x is not None:
                grad_x[start : start + chunk] = share * (dlogits @ W)
            if grad_weight is not None:
                for some, dz in zip(grad_weight.split(ROWS), dlogits.split(ROWS, 1), strict=True):
                    some.add_(dz.T @ x_, alpha=share)
        ctx.save_for_backward(grad_x, None if grad_weight is None else grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grads = ctx.saved_tensors
        if grad.device.type != "cpu" or grad != 1:  # reading it would make a GPU wait
            grads = [g if g is None else (grad * g.to(grad.dtype)).to(g.dtype) for g in grads]
        return *grads, None, None
