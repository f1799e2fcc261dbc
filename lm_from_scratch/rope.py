r"""Rotary position embedding (RoPE): queries and keys turn by an angle that grows with position.

The D features of a head are D/2 pairs, each a point in a plane. A token at position t turns pair i
by the angle :math:`t \, \omega_i`:

.. math::

   \begin{pmatrix} a' \\ b' \end{pmatrix} =
   \begin{pmatrix} \cos t\omega_i & -\sin t\omega_i \\ \sin t\omega_i & \cos t\omega_i \end{pmatrix}
   \begin{pmatrix} a \\ b \end{pmatrix}, \qquad \omega_i = \theta^{-2i/D}

Two turned vectors have the dot product of one vector and the other turned by the difference, so
:math:`q_m \cdot k_n` depends on the distance :math:`m - n` alone. Early pairs turn fast and tell
neighbours apart; late pairs hardly turn. Nothing is learnt, and values are not turned.

Which features make a pair is a convention of the checkpoint, and nothing in its file names it:

* *half-split*, features i and i + D/2 (Qwen2, Llama in transformers): :func:`apply_rope`;
* *interleaved*, features 2i and 2i + 1 (the paper, Meta's Llama): :func:`apply_rope_interleaved`.

To read more tokens than a model was trained on, a *scaling* slows the pairs down.

Shapes: B batch, H heads, T tokens, D features of a head.

Source: Su et al., *RoFormer*, 2021, arXiv:2104.09864.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn


def _check_sizes(head_dim: int, theta: float) -> None:
    if head_dim < 2 or head_dim % 2 != 0:
        raise ValueError(f"head_dim={head_dim} must be even and at least 2: features turn in pairs")
    if not 1.0 < theta < math.inf:
        raise ValueError(f"theta={theta} must be a finite number above 1")


def _frequencies(
    head_dim: int, base: float | Tensor, device: torch.device | None, dtype: torch.dtype
) -> Tensor:
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
    Raises ``ValueError`` for an odd ``head_dim`` and a ``theta`` of 1 or less.
    """
    _check_sizes(head_dim, theta)
    return _frequencies(head_dim, theta, device, dtype)


def rotation(positions: Tensor, inv_freq: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """``factor`` times the cosine and sine (B, 1, T, D/2) of the angles of ``positions`` (B, T).

    ``inv_freq`` is (D/2,), or (B, 1, D/2) where each row has its own. At least float32, whatever
    the model's dtype: bfloat16 has no 257 (it becomes 256), and a whole radian is lost there.
    Padding (position -1) is turned like any token; attention never looks at it.
    """
    inv_freq = inv_freq.to(torch.promote_types(inv_freq.dtype, torch.float32))
    angles = (positions[..., None] * inv_freq)[:, None]  # (B, 1, T, D/2): alike for all heads
    return angles.cos() * factor, angles.sin() * factor


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

    Raises ``ValueError`` where ``cos`` and ``sin`` are not D/2 angles each.
    """
    _check_angles(x, cos, sin)
    a, b = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)  # (B, H, T, D/2) each
    turned = torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)
    return torch.cat([half.to(x.dtype) for half in turned], dim=-1)


def apply_rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`apply_rope` of ``x`` (B, H, T, D), ``cos`` and ``sin`` (B or 1, 1, T, D/2) for
    pairs that stand side by side: features 2i and 2i + 1. Raises ``ValueError`` as it does."""
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

    Raises ``ValueError`` where the rows are not such heads of whole pairs.
    """
    return _swap_layout(weight, n_head, (2, -1))


def to_half_split(weight: Tensor, n_head: int) -> Tensor:
    """The inverse of :func:`to_interleaved`: ``weight`` (H*D, C) or (H*D,). Raises ``ValueError``
    where the rows are not ``n_head`` heads of whole pairs."""
    return _swap_layout(weight, n_head, (-1, 2))


def _check(scaling: Any, name: str, low: float, above: bool = False) -> None:
    """A field of a scaling must be a finite number, at least (or above) the limit."""
    value = getattr(scaling, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value < math.inf or (above and value == low):
        limit = f"{'above' if above else 'at least'} {low}"
        raise ValueError(f"{type(scaling).__name__}: {name}={value!r} must be a number {limit}")


def _slow_down(inv_freq: Tensor, factor: float, keep: Tensor) -> Tensor:
    """Pairs with ``keep`` 1 turn as before, with ``keep`` 0 ``factor`` times slower."""
    return inv_freq * keep + inv_freq / factor * (1.0 - keep)


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every pair turns ``factor`` times slower, as if positions were divided by it.

    Raises ``ValueError`` for a ``factor`` below 1.

    Source: Chen et al., *Position Interpolation*, 2023, arXiv:2306.15595.
    """

    factor: float

    def __post_init__(self) -> None:
        _check(self, "factor", 1)

    def frequencies(
        self, positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, float]:
        """Frequencies (D/2,), the same for all ``positions`` (B, T), and the factor of cos and sin:
        1."""
        return inverse_frequencies(head_dim, theta, positions.device, dtype) / self.factor, 1.0


@dataclass(frozen=True, kw_only=True)
class DynamicNTKScaling:
    r"""A larger base for longer sequences: the last pair slows most, the first not at all.

    .. math::

       \theta' = \theta \left( s \frac{n}{L} - (s - 1) \right)^{D / (D - 2)}

    with s = ``factor``, L = ``original_length``, and n the highest position of the row plus 1, or L
    if the row is shorter. Each row has its own n (transformers takes the longest of the batch, so
    there a row's result depends on its neighbours).

    As the base grows with the sequence, keys in a cache were turned by an older base: beyond L, the
    cached and the full computation differ. That is the method, and so in transformers too.

    Raises ``ValueError`` for a ``factor`` or an ``original_length`` below 1.

    Source: Peng et al., *YaRN*, 2023, arXiv:2309.00071, which describes it.
    """

    factor: float
    original_length: int

    def __post_init__(self) -> None:
        _check(self, "factor", 1)
        _check(self, "original_length", 1)

    def frequencies(
        self, positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, float]:
        """Frequencies (B, 1, D/2), a set for each row of ``positions`` (B, T), and 1. Raises
        ``ValueError`` for a ``head_dim`` that is odd or below 4."""
        _check_sizes(head_dim, theta)
        if head_dim < 4:
            raise ValueError(f"head_dim={head_dim} must be at least 4: the exponent is D / (D - 2)")
        length = positions.amax(dim=1).add(1).clamp(min=self.original_length)[:, None, None]
        growth = self.factor * length.to(dtype) / self.original_length - (self.factor - 1)
        base = theta * growth ** (head_dim / (head_dim - 2))  # (B, 1, 1)
        return _frequencies(head_dim, base, positions.device, dtype), 1.0


@dataclass(frozen=True, kw_only=True)
class YaRNScaling:
    r"""Fast pairs keep their speed, slow ones are divided by ``factor``, a ramp between.

    Pair i makes :math:`L \omega_i / 2\pi` turns within the original length L. From ``beta_fast``
    turns on it is kept; with ``beta_slow`` or fewer it has not seen every angle, and is slowed. The
    ramp is linear in i, as in the authors' code and all checkpoints (the paper writes it in turns),
    and ``truncate`` rounds its ends outwards to whole pairs.

    cos and sin grow by ``attention_factor`` (so scores grow by its square, which makes attention
    sharper): :math:`0.1 \, m \ln s + 1`, with m = 1, or a ratio of two such where ``mscale`` and
    ``mscale_all_dim`` are given (DeepSeek).

    Raises ``ValueError`` for numbers that are no scaling, like ``beta_fast`` below ``beta_slow``.

    Source: Peng et al., *YaRN*, 2023, arXiv:2309.00071.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check(self, "factor", 1)
        _check(self, "original_length", 1)
        _check(self, "beta_slow", 0, above=True)
        _check(self, "beta_fast", self.beta_slow, above=True)
        if self.attention_factor is not None:
            _check(self, "attention_factor", 0, above=True)
        for name in ("mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                _check(self, name, 0)

    def magnitude(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        grow = 0.1 * math.log(self.factor)
        if self.mscale and self.mscale_all_dim:
            return (self.mscale * grow + 1.0) / (self.mscale_all_dim * grow + 1.0)
        return grow + 1.0

    def frequencies(
        self, positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, float]:
        """Frequencies (D/2,), the same for all ``positions`` (B, T), and :meth:`magnitude`."""
        inv_freq = inverse_frequencies(head_dim, theta, positions.device, dtype)
        ends = [  # the i, a real number, whose pair makes that many turns
            head_dim * math.log(self.original_length / (2 * math.pi * turns), theta) / 2
            for turns in (self.beta_fast, self.beta_slow)
        ]
        if self.truncate:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        first, last = max(ends[0], 0), min(ends[1], head_dim - 1)
        width = (last - first) or 1  # where both ends are one pair, the ramp is a step after it
        i = torch.arange(head_dim // 2, device=positions.device, dtype=dtype)
        keep = 1.0 - ((i - first) / width).clamp(0, 1)
        return _slow_down(inv_freq, self.factor, keep), self.magnitude()


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """As YaRN, with a ramp linear in turns, from ``low_freq_factor`` (slowed) to
    ``high_freq_factor`` (kept), and cos and sin not grown.

    Raises ``ValueError`` for numbers that are no scaling, like ``high_freq_factor`` below
    ``low_freq_factor``.

    Source: Meta's code for Llama 3.1, ``apply_scaling``; the models: 2024, arXiv:2407.21783.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self) -> None:
        _check(self, "factor", 1)
        _check(self, "low_freq_factor", 0, above=True)
        _check(self, "high_freq_factor", self.low_freq_factor, above=True)
        _check(self, "original_length", 1)

    def frequencies(
        self, positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, float]:
        """Frequencies (D/2,), the same for all ``positions`` (B, T), and the factor of cos and sin:
        1."""
        inv_freq = inverse_frequencies(head_dim, theta, positions.device, dtype)
        turns = self.original_length * inv_freq / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _slow_down(inv_freq, self.factor, keep.clamp(0, 1)), 1.0


RopeScaling = LinearScaling | DynamicNTKScaling | YaRNScaling | Llama3Scaling


class RotaryEmbedding(nn.Module):
    """Positions to cosines and sines, for all layers of a model: one object, used once a forward.

    It holds numbers and no tensor, so there is nothing for ``.to(torch.bfloat16)`` to round, for
    the meta device to lose, or for a longer sequence to outgrow: each call computes from the
    positions it gets, which costs little beside a single layer.

    Raises ``ValueError`` for an odd ``head_dim`` and a ``theta`` of 1 or less.
    """

    def __init__(
        self, head_dim: int, theta: float = 10000.0, scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        _check_sizes(head_dim, theta)
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


_TYPES: dict[str, type[Any]] = {
    "linear": LinearScaling,
    "dynamic": DynamicNTKScaling,
    "yarn": YaRNScaling,
    "llama3": Llama3Scaling,
}
_KEYS = {"original_length": "original_max_position_embeddings"}  # where transformers' name differs


def scaling_from_dict(
    rope_parameters: Mapping[str, Any], block_size: int | None = None
) -> tuple[float | None, RopeScaling | None]:
    """Theta (None where absent) and scaling of the ``rope_parameters`` of a ``config.json``, or of
    the older ``rope_scaling``.

    ``block_size`` is the config's ``max_position_embeddings``: the original length where the
    dictionary names none, and for ``dynamic`` in any case, as in transformers. Keys that no scaling
    has are ignored. Raises ``ValueError`` for a rotation that this module does not have, and where
    a key is missing.
    """
    given = {key: value for key, value in rope_parameters.items() if value is not None}
    for key, value in given.items():
        if isinstance(value, Mapping):
            raise ValueError(f"rope_parameters[{key!r}] is a dictionary: one rotation per model")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor={given['partial_rotary_factor']} must be 1: all features turn"
        )
    theta = given.get("rope_theta")
    name = given.get("rope_type", given.get("type", "default"))
    if name == "default":
        return theta, None
    if name not in _TYPES:
        raise ValueError(f"rope_type={name!r} is not one of {['default', *_TYPES]}")

    if block_size is not None:
        given.setdefault("original_max_position_embeddings", block_size)
        if name == "dynamic":
            given["original_max_position_embeddings"] = block_size
        if name == "yarn":
            given.setdefault("factor", block_size / given["original_max_position_embeddings"])
    values = {}
    for field in fields(_TYPES[name]):
        key = _KEYS.get(field.name, field.name)
        if key in given:
            values[field.name] = given[key]
        elif field.default is MISSING:
            raise ValueError(f"rope_type={name!r} needs {key!r}, which is not in {sorted(given)}")
    return theta, _TYPES[name](**values)


def scaling_to_dict(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """``rope_parameters`` as transformers writes them: the inverse of :func:`scaling_from_dict`."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    name = next(name for name, kind in _TYPES.items() if isinstance(scaling, kind))
    values = {_KEYS.get(f.name, f.name): getattr(scaling, f.name) for f in fields(scaling)}
    given = {key: value for key, value in values.items() if value is not None}
    return {"rope_type": name, "rope_theta": theta, **given}
