r"""Rotary position embedding (RoPE): queries and keys turn by an angle that grows with position.

The D features of a head are D/2 pairs, each a point in a plane. A token at position t turns pair i
by the angle :math:`t \, \omega_i`:

.. math::

   \begin{pmatrix} a' \\ b' \end{pmatrix} =
   \begin{pmatrix} \cos t\omega_i & -\sin t\omega_i \\ \sin t\omega_i & \cos t\omega_i \end{pmatrix}
   \begin{pmatrix} a \\ b \end{pmatrix}, \qquad \omega_i = \theta^{-2i/D}

Two turned vectors have the dot product of one vector and the other turned by the difference, so
:math:`q_m \cdot k_n` depends on the distance :math:`m - n` alone. Early pairs turn fast and tell
neighbours apart; late pairs hardly turn. Nothing is learned, and values are not turned.

Which features make a pair is a convention of the checkpoint, and nothing in its file names it:

* *half-split*, features i and i + D/2 (Qwen2, Llama in transformers): :func:`apply_rope`;
* *interleaved*, features 2i and 2i + 1 (the paper, Meta's Llama): :func:`apply_rope_interleaved`.

Not every feature and not every layer has to turn. :func:`apply_partial_rope` leaves the last
features of a head as they are, and a layer whose queries and keys are :func:`unrotated` (NoPE)
knows of order only what the causal mask tells it.

To read more tokens than a model was trained on, a *scaling* slows the pairs down:
:mod:`lm_from_scratch.layers.rope_scaling`.

Shapes: B batch, H heads, T tokens, D features of a head.

Sources: Su et al., *RoFormer*, 2021, arXiv:2104.09864; partial: Black et al., *GPT-NeoX-20B*, 2022,
arXiv:2204.06745; none: Kazemnejad et al., *The Impact of Positional Encoding on Length
Generalization in Transformers*, 2023, arXiv:2305.19466.
"""

import math
from collections.abc import Callable
from typing import Annotated, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lm_from_scratch.limits import Limit, Positive

#: What a config says of the slowest pair.
Theta = Annotated[Positive, Limit("must be above 1", lambda theta: theta > 1)]


def check_sizes(head_dim: int, theta: float) -> None:
    """Raises ``ValueError`` for an odd ``head_dim`` and a ``theta`` of 1 or less."""
    if head_dim < 2 or head_dim % 2 != 0:
        raise ValueError(f"head_dim={head_dim} must be even and at least 2: features turn in pairs")
    if not 1.0 < theta < math.inf:
        raise ValueError(f"theta={theta} must be a finite number above 1")


def base_frequencies(
    head_dim: int, base: float | Tensor, device: torch.device | None, dtype: torch.dtype
) -> Tensor:
    """One over the powers of ``base``, a number or (B, 1, 1): (D/2,) or (B, 1, D/2)."""
    i2 = torch.arange(0, head_dim, 2, device=device, dtype=dtype)
    return 1.0 / base ** (i2 / head_dim)


def inverse_frequencies(
    head_dim: int,
    theta: float,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    r"""The angles per position :math:`\theta^{-2i/D}` (D/2,), from 1 down to almost 1/theta.

    (Their inverses, up to :math:`2\pi`, are the wavelengths; hence the usual name ``inv_freq``.)
    """
    check_sizes(head_dim, theta)
    return base_frequencies(head_dim, theta, device, dtype)


def rotation(positions: Tensor, inv_freq: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """``factor`` times the cosine and sine (B, 1, T, D/2) of the angles of ``positions`` (B, T).

    ``inv_freq`` is (D/2,), or (B, 1, D/2) where each row has its own. At least float32, whatever
    the model's dtype: bfloat16 has no 257 (it becomes 256), and a whole radian is lost there.
    Padding (position -1) is turned like any token; attention never looks at it.
    """
    inv_freq = inv_freq.to(torch.promote_types(inv_freq.dtype, torch.float32))
    angles = (positions[..., None] * inv_freq)[:, None]  # (B, 1, T, D/2): alike for all heads
    return angles.cos() * factor, angles.sin() * factor


#: Turns queries or keys (B, H, T, D) to their positions, given cosines and sines.
Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]


def _check_angles(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    # A single angle would be broadcast over all pairs, and an odd D cut into unequal halves.
    if not 2 * cos.shape[-1] == 2 * sin.shape[-1] == x.shape[-1]:
        raise ValueError(
            f"x has D={x.shape[-1]} features, so cos and sin must have half as many angles each: "
            f"cos has {cos.shape[-1]}, sin {sin.shape[-1]}"
        )


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys ``x`` (B, H, T, D) whose pairs are half-split: features i and i + D/2;
    ``cos`` and ``sin`` (B or 1, 1, T, D/2) are those of :func:`rotation`.

    Half-precision ``x`` is turned in the float32 of ``cos`` and ``sin``, and cast back once.
    (transformers casts the cosines down to ``x`` first, which adds their rounding error.)
    The result is contiguous, in whatever order ``x`` lies.
    """
    _check_angles(x, cos, sin)
    a, b = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)  # (B, H, T, D/2) each
    turned = torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)
    return torch.cat([half.to(x.dtype) for half in turned], dim=-1)


def apply_partial_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first R features of queries or keys ``x`` (B, H, T, D), for ``cos`` and ``sin``
    (B or 1, 1, T, R/2); the other D - R pass as they are.

    Pairs are half-split within the R features: i and i + R/2. The angles are those of a head of R
    features, ``RotaryEmbedding(R, theta)``: R, and not D, divides the exponents.

    Raises ``ValueError`` if R is larger than D.
    """
    turned, rest = x.tensor_split([2 * cos.shape[-1]], dim=-1)  # (B, H, T, R), (B, H, T, D - R)
    return torch.cat([apply_rope(turned, cos, sin), rest], dim=-1)


def unrotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys ``x`` (B, H, T, D) as they are, whatever ``cos`` and ``sin`` (B or 1, 1, T,
    angles) say: the rotation of a layer without positions."""
    return x


def log_scale(positions: Tensor, floor: int = 8192, strength: float = 0.1) -> Tensor:
    r"""What queries at ``positions`` (B, T) are multiplied by, (B, 1, T, 1): :math:`1 + s \log(1 +
    \lfloor (t + 1) / f \rfloor)`, as in Llama 4. More keys make softmax flatter; a query that
    grows with their logarithm stays as sharp. Up to position f - 2 nothing changes."""
    steps = torch.floor((positions[:, None, :, None] + 1) / floor)
    return 1.0 + strength * torch.log1p(steps)


def apply_rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`apply_rope` of ``x`` (B, H, T, D), ``cos`` and ``sin`` (B or 1, 1, T, D/2) for
    pairs that stand side by side: features 2i and 2i + 1."""
    _check_angles(x, cos, sin)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2).to(x.dtype)


def _swap_layout(weight: Tensor, n_head: int, shape: tuple[int, int]) -> Tensor:
    if n_head < 1 or weight.shape[0] % (2 * n_head) != 0:
        raise ValueError(f"{weight.shape[0]} rows cannot be n_head={n_head} heads of whole pairs")
    return weight.unflatten(0, (n_head, *shape)).transpose(1, 2).flatten(0, 2)


def to_interleaved(weight: Tensor, n_head: int) -> Tensor:
    """The rows of the ``weight`` (H*D, C) of a q or k projection, or of its bias (H*D,), from
    half-split to interleaved.

    ``n_head`` is the number of *its* heads: for k the key heads.
    """
    return _swap_layout(weight, n_head, (2, -1))


def to_half_split(weight: Tensor, n_head: int) -> Tensor:
    """The inverse of :func:`to_interleaved`: ``weight`` (H*D, C) or (H*D,)."""
    return _swap_layout(weight, n_head, (-1, 2))


@runtime_checkable
class RopeScaling(Protocol):
    """What slows the pairs down, as every class of :mod:`lm_from_scratch.layers.rope_scaling`."""

    def frequencies(
        self, positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, float]:
        """Frequencies (D/2,), or (B, 1, D/2) where each row of ``positions`` (B, T) has its own,
        and the factor of cos and sin."""
        ...


class RotaryEmbedding(nn.Module):
    """Positions to cosines and sines, for all layers of a model: one object, used once a forward.

    It holds numbers and no tensor, so there is nothing for ``.to(torch.bfloat16)`` to round, for
    the meta device to lose, or for a longer sequence to outgrow: each call computes from the
    positions it gets, which costs little beside a single layer.
    """

    def __init__(
        self, head_dim: int, theta: float = 10000.0, scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        check_sizes(head_dim, theta)
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = scaling

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin (B, 1, T, D/2) of ``positions`` (B, T), float64 for a model of that dtype,
        else float32."""
        work = torch.promote_types(dtype, torch.float32)
        if self.scaling is None:
            inv_freq = inverse_frequencies(self.head_dim, self.theta, positions.device, work)
            return rotation(positions, inv_freq)
        inv_freq, factor = self.scaling.frequencies(positions, self.head_dim, self.theta, work)
        return rotation(positions, inv_freq, factor)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, theta={self.theta}, scaling={self.scaling}"
