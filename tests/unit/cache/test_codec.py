"""codec.py: numbers rounded in groups, and what that costs attention."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.cache.codec import EXACT, Quantized
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.kv import KVCache


def one_layer(cache: KVCache, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A pass through a cache with one layer and without a model."""
    cache.see(k[:, 0])
    return cache[0].update(k, v)


@given(
    st.sampled_from([4, 8]), st.sampled_from([2, 8, 16, 64]), st.floats(-3, 3), st.floats(-2, 2),
    st.integers(0, 10**6),
)  # fmt: skip
def test_quantised_numbers_move_by_at_most_half_a_step(bits, group, scale, shift, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 5, 16, generator=generator) * 10**scale + 10**shift
    codec = Quantized(bits, group)
    codes, low, step = codec.encode(x)
    back = codec.decode([codes, low, step])
    assert codes.dtype == torch.uint8 and back.shape == x.shape and back.dtype == x.dtype
    groups = x.unflatten(-1, (-1, min(group, 16)))
    want = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    torch.testing.assert_close(step[..., 0], want)
    slack = 4 * torch.finfo(x.dtype).eps * groups.abs().amax(-1, keepdim=True)
    error = (back.unflatten(-1, (-1, min(group, 16))) - groups).abs()
    assert (error <= step / 2 + slack).all()
    assert codes.numel() == x.numel() * bits // 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantised_half_precision_keeps_its_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    codec = Quantized(8)
    back = codec.decode(codec.encode(x))
    assert back.dtype == dtype
    step = codec.encode(x)[2].float()
    bound = step / 2 + 2 * torch.finfo(dtype).eps * x.float().abs().max()
    assert ((back - x).float().abs().unflatten(-1, (2, 32)) <= bound).all()


def test_equal_numbers_have_no_step_and_come_back() -> None:
    x = torch.full((1, 1, 1, 8), 3.7)
    assert torch.equal(Quantized(4).decode(Quantized(4).encode(x)), x)


def test_the_error_of_attention_is_bounded_by_the_steps() -> None:
    """Scores move by d <= |q|_1 step/2 / sqrt(D), weights by a factor within exp(+-2d)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, 16, generator=generator).double() for _ in range(3))
    (visibility,) = NO_CACHE.see(q[:, 0])
    want = formula_attention(q, k, v, visibility)
    errors = []
    for bits in (4, 8):
        codec = Quantized(bits, 8)
        parts = codec.encode(k), codec.encode(v)
        got = formula_attention(q, *(codec.decode(part) for part in parts), visibility)
        d = q.abs().sum(-1).amax() * parts[0][2].amax() / 2 / 16**0.5
        bound = parts[1][2].amax() / 2 + (torch.exp(2 * d) - 1) * v.abs().amax()
        errors.append((got - want).abs().max().item())
        assert errors[-1] <= bound
    assert errors[1] < errors[0] / 8


def test_a_quantised_cache_holds_as_many_bytes_as_the_formula_says() -> None:
    k = torch.randn(1, 2, 10, 64)
    sizes = []
    for codec in (EXACT, Quantized(8), Quantized(4)):
        cache = GrowingCache(1, codec)
        one_layer(cache, k, k)
        sizes.append(cache.nbytes)
    numbers, groups = 2 * 2 * 10 * 64, 2 * 2 * 10 * 64 // 32
    assert sizes == [4 * numbers, numbers + 8 * groups, numbers // 2 + 8 * groups]


def test_groups_that_do_not_fit_are_refused() -> None:
    for bad, message in (
        (lambda: Quantized(3), "bits=3 must be 4 or 8"),
        (lambda: Quantized(8, 0), "group=0"),
        (lambda: Quantized(4, 7), "even for 4 bits"),
        (lambda: Quantized(8, 5).encode(torch.ones(1, 1, 1, 16)), "D=16 features cannot be cut"),
        (lambda: Quantized(4, 32).encode(torch.ones(1, 1, 1, 7)), "two codes in a byte"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()


def test_a_wide_range_of_half_precision_is_quantised() -> None:
    x = torch.tensor([-40000.0, 40000.0, 1.0, 0.0]).half().reshape(1, 1, 1, 4)
    back = Quantized(8).decode(Quantized(8).encode(x))
    assert (back.float() - x.float()).abs().max() <= 80000 / 255 / 2 * 1.1
