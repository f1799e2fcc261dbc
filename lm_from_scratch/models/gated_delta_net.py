r"""Gated DeltaNet: a layer instead of attention, with a state instead of keys and values.

Queries, keys and values are projected as in attention, and each feature then passes a short
convolution over its last few values. The delta rule writes and reads a state of fixed size in every
head (:mod:`~lm_from_scratch.layers.delta_rule`), under two gates that each token computes itself:

.. math::

   g_t = -e^{A} \, \mathrm{softplus}(a_t + b_{\mathrm{dt}}), \qquad
   \beta_t = \mathrm{sigmoid}(b_t)

with a number :math:`A` and a bias for each head: how fast everything fades, and how much of the
correction is written. The output is normalised, head by head, and multiplied by the silu of a third
projection, z.

Nothing says where a token stands: no rotation is needed, since the order is that of the writing.

Shapes: B batch, T tokens, C features, Hk heads of queries and keys, each shared by Hv / Hk heads of
values, Dk and Dv their features.

Source: Yang et al., *Gated Delta Networks: Improving Mamba2 with Delta Rule*, 2024,
arXiv:2412.06464; names of modules and order of features as in Qwen3-Next.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import LayerCache
from lm_from_scratch.layers.activation import ACTIVATIONS
from lm_from_scratch.layers.delta_rule import (
    DeltaRule,
    chunk_delta_rule,
    recurrent_delta_rule,
    unit_length,
)
from lm_from_scratch.layers.norm import RMSNorm
from lm_from_scratch.layers.recurrent import RecurrentLayer
from lm_from_scratch.layers.short_convolution import short_convolution


class GatedRMSNorm(RMSNorm):
    """RMSNorm of ``x`` (..., D), times the silu of ``gate`` (..., D)."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        y = self.normalise(x, self.weight, self.eps)
        return (y * F.silu(gate.to(torch.promote_types(gate.dtype, torch.float32)))).to(x.dtype)


class GatedDeltaNet(RecurrentLayer):
    """The layer, of ``x`` (B, T, C). ``delta_rule`` is the function that reads several tokens; one
    alone takes the recurrent form.

    Padding (position -1) changes no state, wherever it stands. Of ``documents`` packed into a row
    each begins with an empty state, at its position 0. Raises ``ValueError`` for ``n_value_head``
    that is not a multiple of ``n_key_head``.
    """

    delta_rule: DeltaRule

    def __init__(
        self,
        n_embd: int,
        n_key_head: int = 16,
        n_value_head: int = 32,
        key_dim: int = 128,
        value_dim: int = 128,
        taps: int = 4,
        activation: str = "silu",
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if n_value_head % n_key_head:
            raise ValueError(f"n_value_head={n_value_head} is no multiple of {n_key_head=}")
        self.n_key_head, self.n_value_head = n_key_head, n_value_head
        self.key_dim, self.value_dim, self.taps = key_dim, value_dim, taps
        keys, values = n_key_head * key_dim, n_value_head * value_dim
        self.add_projections(n_embd, keys, values)
        self.conv1d = nn.Conv1d(
            2 * keys + values, 2 * keys + values, taps, groups=2 * keys + values, bias=False
        )
        self.dt_bias = nn.Parameter(torch.ones(n_value_head))
        self.A_log = nn.Parameter(torch.empty(n_value_head))
        self.norm = GatedRMSNorm(value_dim, eps)
        self.out_proj = nn.Linear(values, n_embd, bias=False)
        self.activation = ACTIVATIONS[activation]
        self.delta_rule = chunk_delta_rule
        self.init_gates()

    @torch.no_grad()
    def init_gates(self) -> None:
        """Heads that fade at different rates: A is the logarithm of a number in 0.01 ... 16."""
        self.dt_bias.fill_(1.0)
        self.A_log.uniform_(0.01, 16.0).log_()

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The state before the first token of ``x`` (B, T, C): the inputs of the convolution
        (B, K - 1, features), and the memory (B, Hv, Dk, Dv), in float32 at least."""
        B, work = x.shape[0], torch.promote_types(x.dtype, torch.float32)
        inputs = x.new_zeros(B, self.taps - 1, self.conv1d.in_channels)
        return inputs, x.new_zeros(B, self.n_value_head, self.key_dim, self.value_dim, dtype=work)

    def add_projections(self, n_embd: int, keys: int, values: int) -> None:
        """What :meth:`project` multiplies with, of ``keys`` and ``values`` features."""
        self.in_proj_qkvz = nn.Linear(n_embd, 2 * keys + 2 * values, bias=False)
        self.in_proj_ba = nn.Linear(n_embd, 2 * self.n_value_head, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of ``x`` (B, T, C) the inputs of the convolution (B, T, features), z (B, T, Hv, Dv), and
        the logits a and b of the gates (B, T, Hv). The features of a projection lie key head by key
        head, each with what belongs to its value heads."""
        (B, T, _), Hk = x.shape, self.n_key_head
        values = self.n_value_head // Hk * self.value_dim
        qkvz = self.in_proj_qkvz(x).view(B, T, Hk, -1)
        q, k, v, z = qkvz.split([self.key_dim, self.key_dim, values, values], dim=-1)
        b, a = self.in_proj_ba(x).view(B, T, Hk, -1).chunk(2, dim=-1)
        qkv = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], dim=-1)
        return qkv, z.reshape(B, T, -1, self.value_dim), a.flatten(2), b.flatten(2)

    def gates(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """g and beta (B, Hv, T) of their logits ``a`` and ``b`` (B, T, Hv), in float32 at least."""
        work = torch.promote_types(a.dtype, torch.float32)
        g = -self.A_log.to(work).exp() * F.softplus(a.to(work) + self.dt_bias)
        return g.transpose(1, 2), b.sigmoid().to(work).transpose(1, 2)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k (B, Hv, T, Dk), of length 1 but for the scale of q, and v (B, Hv, T, Dv), of
        ``qkv`` (B, T, features), which comes out of the convolution."""
        B, T, _ = qkv.shape
        keys = self.n_key_head * self.key_dim
        q, k, v = qkv.split([keys, keys, self.n_value_head * self.value_dim], dim=-1)
        q, k = (unit_length(x.view(B, T, -1, self.key_dim)).transpose(1, 2) for x in (q, k))
        shared = self.n_value_head // self.n_key_head
        q, k = (x.repeat_interleave(shared, dim=1) for x in (q * self.key_dim**-0.5, k))
        return q, k, v.view(B, T, -1, self.value_dim).transpose(1, 2)

    def forward(self, x: Tensor, visibility: Visibility, cache: LayerCache) -> Tensor:
        positions = None if visibility.dense else visibility.query_positions.expand(x.shape[:2])
        documents = visibility.query_documents
        inputs, memory = cache.state(*self.initial_state(x))
        qkv, z, a, b = self.project(x)
        qkv, inputs = short_convolution(qkv, self.conv1d.weight[:, 0], inputs, positions, documents)
        q, k, v = self.heads(self.activation(qkv))
        g, beta = self.gates(a, b)
        forget = None
        if positions is not None:
            padding = (positions < 0)[:, None]  # (B, 1, T): nothing fades, nothing is written
            g, beta = g.masked_fill(padding, 0.0), beta.masked_fill(padding, 0.0)
            forget = positions == 0 if documents is not None else None
        rule = recurrent_delta_rule if x.shape[1] == 1 else self.delta_rule
        y, memory = rule(q, k, v, g, beta, memory, forget)
        cache.keep(inputs, memory)
        return self.out_proj(self.norm(y.transpose(1, 2), z).flatten(2))
