r"""RMSNorm: each token's vector is divided by the root of its mean square.

The mean stays where it is, unlike in :mod:`~lm_from_scratch.layers.layer_norm`: for a vector
:math:`x` of :math:`C` features nothing is subtracted, and nothing is added:

.. math::

   r = \frac{1}{\sqrt{\frac{1}{C} \sum_c x_c^2 + \epsilon}}, \qquad
   y_c = x_c \, r \, w_c

Source: Zhang, Sennrich, *Root Mean Square Layer Normalization*, 2019, arXiv:1910.07467.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm over the last dimension of ``x`` (..., C), times the ``weight`` (C,).

    Half-precision inputs are computed in float32 and rounded *before* the weight multiplies them,
    in the order of the published models; float64 stays float64.
    """
    work = torch.promote_types(x.dtype, torch.float32)
    h = x.to(work)
    h = h * torch.rsqrt(h.square().mean(dim=-1, keepdim=True) + eps)
    return h.to(x.dtype) * weight


class RMSNormFunction(torch.autograd.Function):
    r""":func:`rms_norm` with its gradient derived by hand, about twice as fast on a CPU.

    With :math:`h = x r` and the incoming gradient :math:`g`:

    .. math::

       \frac{\partial L}{\partial w_c} = \sum_{\text{tokens}} g_c h_c, \qquad
       \frac{\partial L}{\partial x_c} =
       r \Bigl(g_c w_c - h_c \, \tfrac{1}{C} \sum_i g_i w_i h_i\Bigr)

    Only ``x`` and one number per token are kept for it. For second derivatives and the transforms
    of ``torch.func``, use :func:`rms_norm`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        work = torch.promote_types(x.dtype, torch.float32)
        h = x.to(work)
        norm = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
        r = torch.rsqrt(norm.square() / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight, r)
        return (h * r).to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, r = ctx.saved_tensors
        h, g, w = x.to(r.dtype) * r, grad.to(r.dtype), weight.to(r.dtype)
        gh = g * h
        mean = (gh @ w)[..., None] / x.shape[-1]
        grad_x = (g * w).addcmul_(h, mean, value=-1.0).mul_(r)
        grad_weight = gh.reshape(-1, x.shape[-1]).sum(dim=0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def fast_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """:func:`rms_norm` of ``x`` (..., C) and ``weight`` (C,): through :class:`RMSNormFunction`
    where a backward pass may follow or numbers are rounded, else through torch's own kernel (which
    rounds half precision *after* the weight). Raises ``ValueError`` for a weight of another width.
    """
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x has {x.shape[-1]} features, and the weight {weight.shape[0]}")
    if not torch.is_grad_enabled() and x.dtype == weight.dtype and x.itemsize >= 4:
        return F.rms_norm(x, weight.shape, weight, eps)
    return RMSNormFunction.apply(x, weight, eps)


class RMSNorm(nn.Module):
    """RMSNorm of ``x`` (..., C) over its C = ``n_embd`` features, with a weight (ones) and no bias.

    ``normalise`` is the function that computes it, :func:`rms_norm` with a faster gradient; the
    tests hold the two equal, in value and in gradient. ``torch.func`` (``vmap``, ``grad`` of one
    example each) knows the plain one alone: a Qwen2 for it has ``normalise = rms_norm`` in every
    norm, and ``product = swiglu`` in every :class:`~lm_from_scratch.layers.gated_mlp.GatedMLP`.
    """

    normalise: Callable[[Tensor, Tensor, float], Tensor]

    def __init__(self, n_embd: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_embd))
        self.eps = eps
        self.normalise = fast_rms_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.normalise(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def zero_centred_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    r"""RMSNorm over the last dimension of ``x`` (..., C), times :math:`1 + w` for the ``weight``
    (C,).

    A weight of 0 changes nothing, so weight decay pulls the norm towards doing nothing, and not
    towards silence. Half precision is rounded *after* the product, in the order of the published
    models (Gemma, Qwen3-Next).
    """
    work = torch.promote_types(x.dtype, torch.float32)
    return rms_norm(x.to(work), 1.0 + weight.to(work), eps).to(x.dtype)


class ZeroCentredRMSNorm(nn.Module):
    """:func:`zero_centred_rms_norm` of ``x`` (..., C) over its C = ``n_embd`` features, with a
    weight (zeros)."""

    def __init__(self, n_embd: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n_embd))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return zero_centred_rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
