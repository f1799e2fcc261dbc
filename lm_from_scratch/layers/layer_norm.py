r"""LayerNorm: each token's vector is moved to mean 0 and variance 1.

A learned weight and bias then set the scale and the level of every feature. For a vector :math:`x`
of :math:`C` features

.. math::

   \mu = \frac{1}{C} \sum_c x_c, \qquad
   \sigma^2 = \frac{1}{C} \sum_c (x_c - \mu)^2, \qquad
   y_c = \frac{x_c - \mu}{\sqrt{\sigma^2 + \epsilon}} \, w_c + b_c

The variance is the biased one (divided by :math:`C`), and :math:`\epsilon` is inside the root.

Source: Ba, Kiros, Hinton, *Layer Normalization*, 2016, arXiv:1607.06450.
"""

import torch
from torch import Tensor, nn


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """The formula above over the last dimension of ``x`` (..., C), with ``weight`` (C,) and
    ``bias`` (C,).

    Half-precision inputs are computed in float32: the square of an activation of 300 does not fit
    into float16, whose largest number is 65504.
    """
    work = torch.promote_types(x.dtype, torch.float32)
    h = x.to(work)
    h = h - h.mean(dim=-1, keepdim=True)
    h = h * torch.rsqrt(h.square().mean(dim=-1, keepdim=True) + eps)
    return (h * weight.to(work) + bias.to(work)).to(x.dtype)


class LayerNorm(nn.Module):
    """LayerNorm of ``x`` (..., C) over its C = ``n_embd`` features, with a weight (ones) and a bias
    (zeros). ``forward`` calls torch's fused kernel, which computes :func:`layer_norm` in one pass
    over memory. The tests hold the two equal, in value and in gradient."""

    def __init__(self, n_embd: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_embd))
        self.bias = nn.Parameter(torch.zeros(n_embd))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        return torch.layer_norm(x, weight.shape, weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
