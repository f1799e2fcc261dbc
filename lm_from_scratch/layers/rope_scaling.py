r"""Scalings of RoPE: slower pairs, for texts longer than a model was trained on.

An angle that no pair reached in training tells the model nothing. A scaling slows pairs down, so
that a longer text stays within the angles that were seen.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from lm_from_scratch.layers.rope import base_frequencies, check_sizes, inverse_frequencies
from lm_from_scratch.limits import Limit, check, is_plain


def _at_least(least: float) -> Limit:
    return Limit(f"must be a number at least {least}", lambda x: is_plain(x) and x >= least)


_ABOVE_0 = Limit("must be a number above 0", lambda x: is_plain(x) and x > 0)
_SHARE = Limit("must be a number from 0 to 1", lambda x: is_plain(x) and 0 <= x <= 1)
#: A factor, and a length in tokens: 1 changes nothing, and less is not meant.
_Factor = Annotated[float, _at_least(1)]
_Length = Annotated[int, _at_least(1)]
_Size = Annotated[float, _at_least(0)]


def _above(name: str) -> Limit:
    above = f"must be a number above {{{name}}}"
    return Limit(above, lambda x, low: is_plain(x) and x > low, name)


class _Checked:
    """A scaling, whose numbers are what their types say."""

    def __post_init__(self) -> None:
        try:
            check(self)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}: {error}") from None


def _slow_down(inv_freq: Tensor, factor: float, keep: Tensor) -> Tensor:
    """Pairs with ``keep`` 1 turn as before, with ``keep`` 0 ``factor`` times slower."""
    return inv_freq * keep + inv_freq / factor * (1.0 - keep)


@dataclass(frozen=True, kw_only=True)
class LinearScaling(_Checked):
    """Every pair turns ``factor`` times slower, as if positions were divided by it.

    Source: Chen et al., *Position Interpolation*, 2023, arXiv:2306.15595.
    """

    factor: _Factor

    def frequencies(
        self, positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, float]:
        """Frequencies (D/2,), the same for all ``positions`` (B, T), and the factor of cos and sin:
        1."""
        return inverse_frequencies(head_dim, theta, positions.device, dtype) / self.factor, 1.0


@dataclass(frozen=True, kw_only=True)
class ProportionalScaling(_Checked):
    """The first pairs turn, a share ``partial_rotary_factor`` of all, ``factor`` times slower; the
    slow ones stand still, at frequency 0: what they hold does not depend on the distance.

    Source: the code of Gemma 4 in ``transformers``.
    """

    partial_rotary_factor: Annotated[float, _SHARE] = 1.0
    factor: _Factor = 1.0

    def frequencies(
        self, positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, float]:
        """Frequencies (D/2,), the same for all ``positions`` (B, T), and the factor of cos and sin:
        1."""
        inv_freq = inverse_frequencies(head_dim, theta, positions.device, dtype) / self.factor
        inv_freq[int(self.partial_rotary_factor * head_dim // 2) :] = 0.0
        return inv_freq, 1.0


@dataclass(frozen=True, kw_only=True)
class DynamicNTKScaling(_Checked):
    r"""A larger base for longer sequences: the last pair slows most, the first not at all.

    .. math::

       \theta' = \theta \left( s \frac{n}{L} - (s - 1) \right)^{D / (D - 2)}

    with s = ``factor``, L = ``original_length``, and n the highest position of the row plus 1, or L
    if the row is shorter. Each row has its own n (transformers takes the longest of the batch, so
    there a row's result depends on its neighbours).

    As the base grows with the sequence, keys in a cache were turned by an older base: beyond L, the
    cached and the full computation differ. That is the method, and so in transformers too.

    Source: Peng et al., *YaRN*, 2023, arXiv:2309.00071, which describes it.
    """

    factor: _Factor
    original_length: _Length

    def frequencies(
        self, positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, float]:
        """Frequencies (B, 1, D/2), a set for each row of ``positions`` (B, T), and 1."""
        check_sizes(head_dim, theta)
        if head_dim < 4:
            raise ValueError(f"head_dim={head_dim} must be at least 4: the exponent is D / (D - 2)")
        length = positions.amax(dim=1).add(1).clamp(min=self.original_length)[:, None, None]
        growth = self.factor * length.to(dtype) / self.original_length - (self.factor - 1)
        base = theta * growth ** (head_dim / (head_dim - 2))  # (B, 1, 1)
        return base_frequencies(head_dim, base, positions.device, dtype), 1.0


@dataclass(frozen=True, kw_only=True)
class YaRNScaling(_Checked):
    r"""Fast pairs keep their speed, slow ones are divided by ``factor``, a ramp between.

    Pair i makes :math:`L \omega_i / 2\pi` turns within the original length L. From ``beta_fast``
    turns on it is kept; with ``beta_slow`` or fewer it has not seen every angle, and is slowed. The
    ramp is linear in i, as in the authors' code and all checkpoints (the paper writes it in turns),
    and ``truncate`` rounds its ends outwards to whole pairs.

    cos and sin grow by ``attention_factor`` (so scores grow by its square, which makes attention
    sharper): :math:`0.1 \, m \ln s + 1`, with m = 1, or a ratio of two such where ``mscale`` and
    ``mscale_all_dim`` are given (DeepSeek).

    Source: Peng et al., *YaRN*, 2023, arXiv:2309.00071.
    """

    factor: _Factor
    original_length: _Length
    beta_fast: Annotated[float, _above("beta_slow")] = 32.0
    beta_slow: Annotated[float, _ABOVE_0] = 1.0
    attention_factor: Annotated[float, _ABOVE_0] | None = None
    mscale: _Size | None = None
    mscale_all_dim: _Size | None = None
    truncate: bool = True

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
class Llama3Scaling(_Checked):
    """As YaRN, with a ramp linear in turns, from ``low_freq_factor`` (slowed) to
    ``high_freq_factor`` (kept), and cos and sin not grown.

    Source: Meta's code for Llama 3.1, ``apply_scaling``; the models: 2024, arXiv:2407.21783.
    """

    factor: _Factor
    low_freq_factor: Annotated[float, _ABOVE_0]
    high_freq_factor: Annotated[float, _above("low_freq_factor")]
    original_length: _Length

    def frequencies(
        self, positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, float]:
        """Frequencies (D/2,), the same for all ``positions`` (B, T), and the factor of cos and sin:
        1."""
        inv_freq = inverse_frequencies(head_dim, theta, positions.device, dtype)
        turns = self.original_length * inv_freq / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _slow_down(inv_freq, self.factor, keep.clamp(0, 1)), 1.0
