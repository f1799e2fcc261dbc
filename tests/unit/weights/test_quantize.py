"""Quantised weights: the rounding, the tensor that holds the codes, the surgery on a model."""

import copy
import io
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids
from torch import Tensor, nn
from unchanged import assert_same, assert_unchanged, held, snapshot

from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.instruments.layout import lay_out_
from lm_from_scratch.instruments.onednn import use_onednn_
from lm_from_scratch.models.heads import SequenceClassifier, TokenClassifier
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.weights import int4
from lm_from_scratch.weights.int4 import Int4Weight, block_rows, kernel_reads
from lm_from_scratch.weights.int8 import Int8Weight
from lm_from_scratch.weights.packed_int8 import largest_code
from lm_from_scratch.weights.quantize import dequantize_, quantize_, quantized_weights
from lm_from_scratch.weights.quantized_weight import KERNEL_DTYPES, QuantizedWeight

KINDS = [Int8Weight, Int4Weight]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LOW = [torch.bfloat16, torch.float16]
kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def make(
    kind: type[QuantizedWeight],
    N: int = 6,
    K: int = 8,
    group_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> QuantizedWeight:
    return kind.quantize(numbers(N, K, dtype=dtype), group_size)


def single_codes(weight: QuantizedWeight) -> Tensor:
    """Codes (N, K), one in a byte, read from the parts for files."""
    codes = weight.parts()["codes"]
    if weight.bits == 8:
        return codes
    return torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)


def exact(weight: QuantizedWeight) -> Tensor:
    """The matrix by the formula, in float64, from the parts for files."""
    parts = {name: part.double() for name, part in weight.parts().items()}
    groups = single_codes(weight).double().unflatten(1, (-1, weight.group_size))
    if weight.bits == 8:
        return (parts["scale"][..., None] * groups).flatten(1)
    return (parts["zero"][..., None] + parts["scale"][..., None] * (groups - 8)).flatten(1)


# ----------------------------------------------------------------------------------- rounding


@kinds
@dtypes
@pytest.mark.parametrize("group_size", [None, 16, 32, 4])
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_the_error_is_at_most_half_a_step(
    kind: type[QuantizedWeight], dtype: torch.dtype, group_size: int | None, size: float
) -> None:
    w = (numbers(70, 64, dtype=torch.float64) * size).to(dtype)
    weight = kind.quantize(w, group_size)
    scale = weight.parts()["scale"]
    assert scale.dtype == weight.dtype == dtype
    error = (exact(weight) - w.double()).unflatten(1, (-1, weight.group_size)).abs()
    # the largest code is off by the rounding of the scale; int4 also by that of its zero
    lowest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    slack = (127 if kind is Int8Weight else 15) * lowest / 2
    if kind is Int4Weight:
        slack = slack + torch.finfo(dtype).eps * w.abs().max().double()
    assert (error <= scale.double()[..., None] * (0.5 + 1e-6) + slack).all()
    assert (error > scale.double()[..., None] * 0.4).any()
    # what is decoded is that matrix, but for rounding
    eps = torch.finfo(dtype).eps
    bound = 2 * eps * (exact(weight).abs() + 8 * scale.double().amax()) + 4 * lowest
    assert ((weight.dequantize().double() - exact(weight)).abs() <= bound).all()


def test_int8_equals_fake_quantize_of_torch() -> None:
    w = numbers(9, 33)
    weight = Int8Weight.quantize(w)
    scale = w.abs().amax(dim=1) / 127
    assert torch.equal(weight.scale[:, 0], scale)
    zeros = torch.zeros(9, dtype=torch.int32)
    want = torch.fake_quantize_per_channel_affine(w, scale, zeros, 0, -127, 127)
    torch.testing.assert_close(weight.dequantize(), want, atol=1e-6, rtol=0)
    codes = (want.double() / scale.double()[:, None]).round().to(torch.int8)
    assert torch.equal(weight.codes, codes)


def test_int4_equals_fake_quantize_of_torch() -> None:
    # torch's zero is a whole number of steps, so the ends are too
    w = torch.stack([torch.arange(-5.0, 11.0), torch.arange(-8.0, 8.0) / 4])
    weight = Int4Weight.quantize(w + 0.2 * torch.tensor([[1.0], [0.25]]) * (w % 1 == 0.5))
    scale, zero = torch.tensor([1.0, 0.25]), torch.tensor([5, 8], dtype=torch.int32)
    want = torch.fake_quantize_per_channel_affine(w, scale, zero, 0, 0, 15)
    torch.testing.assert_close(weight.dequantize(), want, atol=1e-6, rtol=0)
    assert torch.equal(single_codes(weight), torch.arange(16, dtype=torch.uint8).expand(2, 16))


@kinds
@pytest.mark.parametrize("group_size", [None, 8])
def test_a_group_does_not_know_the_others(
    kind: type[QuantizedWeight], group_size: int | None
) -> None:
    w = numbers(5, 32)
    before = kind.quantize(w, group_size).dequantize()
    w[2, 8:16] *= 100
    after = kind.quantize(w, group_size).dequantize()
    other = (before != after).any(dim=0).nonzero().flatten().tolist()
    rows = (before != after).any(dim=1).nonzero().flatten().tolist()
    assert rows == [2]
    assert set(other) <= (set(range(8, 16)) if group_size else set(range(32)))


def test_int8_is_symmetric_and_int4_uses_every_code() -> None:
    w = numbers(50, 64)
    codes = Int8Weight.quantize(w).codes
    assert codes.dtype == torch.int8
    assert torch.equal(codes.int().abs().amax(dim=1), torch.full((50,), 127, dtype=torch.int32))
    assert torch.equal(Int8Weight.quantize(-w).codes, -codes)
    codes = single_codes(Int4Weight.quantize(w, 32)).unflatten(1, (-1, 32))
    assert codes.unique().tolist() == list(range(16))
    assert (codes.amin(dim=2) == 0).all() and (codes.amax(dim=2) == 15).all()


@kinds
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@given(
    N=st.integers(1, 70), G=st.integers(1, 3), half=st.integers(1, 8), size=st.floats(1e-30, 1e30)
)
def test_codes_are_a_fixed_point(
    kind: type[QuantizedWeight], dtype: torch.dtype, N: int, G: int, half: int, size: float
) -> None:
    w = numbers(N, 2 * half * G, seed=N, dtype=dtype) * size
    once = kind.quantize(w, 2 * half)
    twice = kind.quantize(once.dequantize(), 2 * half)
    assert torch.equal(single_codes(twice), single_codes(once))
    torch.testing.assert_close(
        twice.dequantize(), once.dequantize(), rtol=1e-5, atol=float(w.abs().max()) * 1e-5
    )


@kinds
@dtypes
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -0.37, 3e-41, 1e4])
def test_a_group_of_equal_numbers(
    kind: type[QuantizedWeight], dtype: torch.dtype, value: float
) -> None:
    w = torch.full((3, 8), value, dtype=dtype)
    back = kind.quantize(w, 4).dequantize()
    if kind is Int4Weight or value == 0.0:
        assert torch.equal(back, w)
    elif value > 1e-40:
        torch.testing.assert_close(back, w, rtol=4 * torch.finfo(dtype).eps, atol=0)
    else:
        assert back.isfinite().all()


@kinds
@pytest.mark.parametrize("value", [1e38, 1e-38, 1e-41, 1e-45])
def test_huge_and_tiny_numbers(kind: type[QuantizedWeight], value: float) -> None:
    w = numbers(3, 8).clamp(-1.5, 1.5) * value
    back = kind.quantize(w).dequantize()
    assert back.isfinite().all()
    assert (back - w).abs().max() <= max(w.abs().max() / (200 if kind is Int8Weight else 10), 1e-42)


@kinds
@pytest.mark.parametrize("N", [1, 7, 63, 64, 65, 130])
@pytest.mark.parametrize("K", [2, 6, 34])
def test_any_shape(kind: type[QuantizedWeight], N: int, K: int) -> None:
    weight = make(kind, N, K)
    assert weight.shape == (N, K) and weight.stride() == (K, 1)
    torch.testing.assert_close(weight.dequantize().double(), exact(weight), atol=1e-5, rtol=0)
    every = torch.arange(N).view(-1, 1)
    assert torch.equal(F.embedding(every, weight).squeeze(1), weight.dequantize())
    assert_same(kind.from_parts(weight.parts()), weight)


def test_odd_rows_fit_8_bits_but_not_bytes_of_two_codes() -> None:
    for K in (1, 5):
        w = numbers(3, K)
        torch.testing.assert_close(Int8Weight.quantize(w).dequantize(), w, atol=0.02, rtol=0)
        with pytest.raises(ValueError, match=f"rows of {K} numbers cannot be kept in 4 bits"):
            Int4Weight.quantize(w)


@kinds
def test_a_strided_weight_is_quantised_like_its_copy(kind: type[QuantizedWeight]) -> None:
    w = numbers(64, 128).T
    weight = kind.quantize(w, 32)
    assert_same(weight, kind.quantize(w.contiguous(), 32))
    assert all(tensor.is_contiguous() for tensor in held(weight))
    w = numbers(128, 192)[::2, ::3]
    assert_same(kind.quantize(w), kind.quantize(w.contiguous()))


def test_the_length_of_a_group_by_default() -> None:
    assert make(Int8Weight, 2, 96).group_size == 96
    assert make(Int4Weight, 2, 128).group_size == 64
    assert make(Int4Weight, 2, 48).group_size == 48


@kinds
@pytest.mark.parametrize(
    ("weight", "group_size", "words"),
    [
        (torch.ones(4), None, r"shape \(4,\)"),
        (torch.tensor(1.0), None, r"shape \(\)"),
        (torch.ones(2, 4, 4), None, r"shape \(2, 4, 4\)"),
        (torch.ones(0, 4), None, r"shape \(0, 4\)"),
        (torch.ones(4, 0), None, r"shape \(4, 0\)"),
        (torch.ones(4, 4).int(), None, "torch.int32"),
        (torch.ones(4, 4).bool(), None, "torch.bool"),
        (torch.ones(4, 4).cfloat(), None, "torch.complex64"),
        (torch.ones(4, 8), 3, "8 numbers .* group_size=3"),
        (torch.ones(4, 8), 16, "8 numbers .* group_size=16"),
        (torch.ones(4, 8), 0, "group_size=0"),
        (torch.ones(4, 8), -4, "group_size=-4"),
        (torch.tensor([[1.0, math.nan]]), None, "not finite"),
        (torch.tensor([[1.0, -math.inf]]), None, "not finite"),
        (torch.tensor([[65504.0, -65504.0]]).half(), None, "too large"),
        (Int8Weight.quantize(torch.ones(4, 4)), None, "Int8Weight already"),
        (Int4Weight.quantize(torch.ones(4, 4)), None, "Int4Weight already"),
    ],
)
def test_what_cannot_be_quantised(
    kind: type[QuantizedWeight], weight: Tensor, group_size: int | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        kind.quantize(weight, group_size)


@kinds
def test_parts_are_plain_and_say_all(kind: type[QuantizedWeight]) -> None:
    weight = make(kind, 70, 32, 8, torch.bfloat16)
    parts = weight.parts()
    assert set(parts) == ({"codes", "scale"} if kind is Int8Weight else {"codes", "scale", "zero"})
    for tensor in parts.values():
        assert type(tensor) is Tensor and tensor.is_contiguous()
    assert parts["codes"].shape == (70, 32 * kind.bits // 8)
    assert parts["scale"].shape == (70, 4)
    if kind is Int4Weight:
        codes = single_codes(weight)
        assert torch.equal(parts["codes"][:, 0], codes[:, 0] + 16 * codes[:, 1])
    back = kind.from_parts({name: part.clone() for name, part in parts.items()})
    assert_same(back, weight)
    assert_same(kind.quantize(numbers(70, 32, dtype=torch.bfloat16), 8), weight)


@kinds
def test_nbytes_is_what_is_held(kind: type[QuantizedWeight]) -> None:
    weight = make(kind, 128, 64, 32, torch.bfloat16)
    want = 128 * 64 * kind.bits // 8 + 128 * 2 * 2 * (1 if kind is Int8Weight else 2)
    assert weight.nbytes == want
    weight = make(kind, 1, 32)
    rows = 1 if kind is Int8Weight else block_rows()
    scales = 4 * rows * (1 if kind is Int8Weight else 2)
    assert weight.nbytes == rows * 32 * kind.bits // 8 + scales


# ----------------------------------------------------------------------------------- kernels


def check_kernels() -> None:
    """The layout of this processor is torch's, and results are the same with and without kernel.

    Also run in processes of their own, which pretend to have another processor.
    """
    codes = torch.randint(16, (128, 64), generator=torch.Generator().manual_seed(0))
    ours = Int4Weight._pack(codes.to(torch.uint8), torch.ones(128, 2), torch.zeros(128, 2))
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    same = torch.equal(ours.codes.flatten(), theirs.flatten())
    assert kernel_reads(block_rows() // 2) == same
    for kind in KINDS:
        for dtype in LOW:
            for N, K, group_size in [
                (7, 64, 64), (64, 64, 32), (65, 256, 256), (130, 128, 128), (64, 96, 96),
                (7, 28, 28), (33, 34, 34), (64, 100, 100), (16, 16, 16), (40, 48, 24),
            ]:  # fmt: skip
                weight = make(kind, N, K, group_size, dtype)
                for rows in (1, 2, 5, kind.few_rows, kind.few_rows + 1):
                    x = numbers(rows, K, seed=1, dtype=dtype)
                    y = F.linear(x, weight)
                    W = weight.dequantize().double()
                    bound = x.double().abs() @ (W.abs() + W.abs().amax(dim=1, keepdim=True)).T
                    error = (y.double() - x.double() @ W.T).abs()
                    assert (error <= 2 * torch.finfo(dtype).eps * bound).all(), (kind, N, K, rows)
                    assert y.is_contiguous() and y.dtype == dtype


def test_kernels() -> None:
    check_kernels()
    assert kernel_reads(block_rows() // 2)  # on the processors that we test with


@pytest.mark.parametrize(
    ("capability", "instructions"),
    [("avx2", "AVX2"), pytest.param("default", "AVX512", marks=pytest.mark.slow)],
)
def test_kernels_of_other_processors(capability: str, instructions: str) -> None:
    """Those of the packed weights too, in one process, which imports torch once: without
    instructions for bytes a sum of two products has 16 bits there, and activations 7."""
    run = (
        "import test_quantize as t; t.check_kernels(); R = t.block_rows(); "
        "import test_packed_int8 as p; code = p.largest_code(); code and p.check_products(); "
        "print(R, t.kernel_reads(R // 2), code)"
    )
    here = Path(__file__).parent
    root, helpers = Path(__file__).parents[3], Path(tiny_models.__file__).parent
    path = os.pathsep.join([*map(str, (here, helpers, root)), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": path}
    environment["FBGEMM_ENABLE_INSTRUCTIONS"] = instructions
    done = subprocess.run(
        [sys.executable, "-c", run], env=environment, capture_output=True, text=True, cwd=here
    )
    assert done.returncode == 0, done.stderr
    block, reads, code = done.stdout.split()
    assert code in (("63", "127") if largest_code() else ("0",))
    assert int(block) == (32 if capability == "avx2" else 64)
    assert reads in ("True", "False")


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@kinds
def test_few_rows_take_the_kernel(
    kind: type[QuantizedWeight], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    original = kind.kernel

    def kernel(self: QuantizedWeight, x: Tensor) -> Tensor | None:
        y = original(self, x)
        calls.append(len(x) if y is not None else -1)
        return y

    monkeypatch.setattr(kind, "kernel", kernel)
    weight = make(kind, 64, 64, 64, dtype)
    for rows in (0, 1, kind.few_rows, kind.few_rows + 1):
        F.linear(numbers(rows, 64, dtype=dtype), weight)
    F.linear(numbers(2, 3, 64, dtype=dtype), weight)
    assert calls == [1, kind.few_rows, 6]
    F.linear(numbers(2, 64), make(kind, 64, 64))
    assert len(calls) == 3
    F.linear(numbers(2, 48, dtype=dtype), make(kind, 64, 48, 24, dtype))
    F.linear(numbers(2, 28, dtype=dtype), make(kind, 64, 28, 28, dtype))
    assert calls[3:] == [-1, -1]
    assert torch.float32 not in KERNEL_DTYPES


def test_the_layout_of_another_processor_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers(3, 64, dtype=torch.bfloat16)
    w = numbers(70, 64, dtype=torch.bfloat16)
    here = Int4Weight.quantize(w)
    fast = F.linear(x, here)
    R = 96 - block_rows()  # 32 for 64, 64 for 32
    monkeypatch.setattr(int4, "block_rows", lambda: R)
    there = Int4Weight.quantize(w)
    assert not kernel_reads(there.codes.shape[2]) and here.codes.shape != there.codes.shape
    assert there.kernel(x) is None
    assert torch.equal(there.dequantize(), here.dequantize())
    assert torch.equal(there.look_up(torch.arange(70)), here.dequantize())
    torch.testing.assert_close(F.linear(x, there), fast, atol=0.1, rtol=0.02)
    monkeypatch.undo()
    other = Int4Weight.quantize(numbers(70, 64, seed=5, dtype=torch.bfloat16))
    other.copy_(there)
    assert_same(other, here)


@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [1, 32, 70, 130])
def test_a_layout_is_all_that_differs_between_processors(
    block: int, dtype: torch.dtype, N: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts and numbers are the same; a copy or a file goes over without a new rounding."""
    w = numbers(N, 64, seed=1, dtype=dtype)
    monkeypatch.setattr(int4, "block_rows", lambda: 96 - block)
    there = Int4Weight.quantize(w, 16)
    parameter = nn.Parameter(there, requires_grad=False)
    stored, file = pickle.dumps(parameter), io.BytesIO()
    torch.save(parameter, file)
    monkeypatch.setattr(int4, "block_rows", lambda: block)
    here = Int4Weight.quantize(w, 16)
    assert here.codes.shape == (-(-N // block), 64, block // 2)
    for name, part in here.parts().items():
        assert torch.equal(part, there.parts()[name])
    assert_same(Int4Weight.from_parts(there.parts()), here)
    assert torch.equal(there.dequantize(), here.dequantize())
    rows = torch.arange(N)
    assert torch.equal(there.look_up(rows), here.look_up(rows))
    copied = Int4Weight.quantize(numbers(N, 64, seed=5, dtype=dtype), 16)
    assert_same(copied.copy_(there), here)
    file.seek(0)
    for back in (pickle.loads(stored), torch.load(file, weights_only=True)):
        assert isinstance(back, nn.Parameter) and not back.requires_grad
        assert_same(back, here)
    x = numbers(3, 64, dtype=dtype)
    for weight in (here, there):
        tolerance = 1e-5 if dtype in (torch.float64, torch.float32) else 0.1
        want = F.linear(x, weight.dequantize())
        torch.testing.assert_close(F.linear(x, weight), want, atol=tolerance, rtol=0.02)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@kinds
def test_the_kernel_reads_x_from_any_address(
    kind: type[QuantizedWeight], dtype: torch.dtype
) -> None:
    weight = make(kind, 64, 64, 64, dtype)
    flat = numbers(64 * 40, dtype=dtype)
    for start in (0, 1, 3, 16):
        x = flat[start : start + 64 * 5].view(5, 64)
        torch.testing.assert_close(
            F.linear(x, weight), F.linear(x.clone(), weight), atol=0.02, rtol=0.01
        )


# ----------------------------------------------------------------------------------- F.linear


@kinds
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (40, 8), (0, 8), (2, 0, 8)])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_linear(
    kind: type[QuantizedWeight], shape: tuple[int, ...], with_bias: bool, grad: bool
) -> None:
    weight = make(kind, dtype=torch.float64)
    x = numbers(*shape, seed=1, dtype=torch.float64)
    bias = numbers(6, seed=2, dtype=torch.float64) if with_bias else None
    want = F.linear(x, exact(weight), bias)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(F.linear(x, weight, bias), want, atol=1e-12, rtol=0)
    if len(shape) == 2:
        strided = x.T.contiguous().T
        y = F.linear(strided, weight=weight, bias=bias)
        torch.testing.assert_close(y, want, atol=1e-12, rtol=0)


@kinds
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64), (2, 0, 64)])
def test_linear_by_the_kernel(
    kind: type[QuantizedWeight], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    weight = make(kind, 70, 64, dtype=dtype)
    x = numbers(*shape, seed=1, dtype=dtype)
    bias = numbers(70, seed=2, dtype=dtype)
    y = F.linear(x, weight, bias)
    want = F.linear(x.double(), weight.dequantize().double(), bias.double())
    torch.testing.assert_close(y.double(), want, atol=0.2, rtol=0.01)
    assert y.dtype == dtype
    if len(shape) == 3 and y.numel():
        strided = x.transpose(0, 1).contiguous().transpose(0, 1)
        torch.testing.assert_close(F.linear(strided, weight, bias), y, atol=0.02, rtol=0.01)


@kinds
def test_a_wrong_x_is_refused(kind: type[QuantizedWeight]) -> None:
    weight = make(kind)
    with pytest.raises(ValueError, match=r"torch.float64 .* torch.float32"):
        F.linear(torch.ones(2, 8).double(), weight)
    with pytest.raises(ValueError, match=r"9 features, .* 8"):
        F.linear(torch.ones(2, 9), weight)
    with pytest.raises(ValueError, match=r"bias is torch.float64"):
        F.linear(torch.ones(2, 8), weight, torch.ones(6).double())
    for shape in [(), (1,), (5,), (2, 6)]:  # torch would spread all but the third
        with pytest.raises(ValueError, match=r"bias is .* of shape .* has 6 rows"):
            F.linear(torch.ones(2, 8), weight, torch.ones(shape))
    with pytest.raises(NotImplementedError, match="not for x"):
        F.linear(weight, torch.ones(3, 8))
    half = make(kind, 64, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"bias is torch.float32"):  # and not promoted
        F.linear(torch.ones(2, 64).bfloat16(), half, torch.ones(64))


@kinds
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients(kind: type[QuantizedWeight], shape: tuple[int, ...], with_bias: bool) -> None:
    weight = make(kind, dtype=torch.float64)
    leaves = [numbers(*shape, seed=1, dtype=torch.float64).requires_grad_()]
    if with_bias:
        leaves.append(numbers(6, seed=2, dtype=torch.float64).requires_grad_())

    def f(*given: Tensor) -> Tensor:
        return F.linear(given[0], weight, *given[1:])

    assert torch.autograd.gradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(f, leaves)
    ours = torch.autograd.grad(f(*leaves).cos().sum(), leaves)
    want = torch.autograd.grad(F.linear(leaves[0], exact(weight), *leaves[1:]).cos().sum(), leaves)
    for a, b in zip(ours, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    assert weight.grad is None


@kinds
def test_the_weight_is_frozen(kind: type[QuantizedWeight]) -> None:
    weight = make(kind).requires_grad_()
    for call in (
        lambda: F.linear(torch.ones(2, 8), weight),
        lambda: F.embedding(torch.tensor([1]), weight),
    ):
        with pytest.raises(ValueError, match=r"requires_grad_\(False\)"):
            call()
        with torch.no_grad():
            call()


@kinds
def test_backward_keeps_codes(kind: type[QuantizedWeight]) -> None:
    weight = make(kind, 128, 128)
    x = numbers(3, 128).requires_grad_()
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.linear(x, weight)
    assert [type(tensor) for tensor in kept] == [kind]
    assert sum(tensor.nbytes for tensor in kept) == weight.nbytes < 128 * 128 * 4 / 3


def pack(model: nn.Module) -> None:
    lay_out_(model, 1, ["packed"])


@kinds
@pytest.mark.parametrize("rows", [3, 40])
def test_autocast(kind: type[QuantizedWeight], rows: int) -> None:
    weight = make(kind, 64, 64)
    x, bias = numbers(rows, 64, seed=1).requires_grad_(), numbers(64, seed=2).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, weight, bias)
    assert y.dtype == torch.bfloat16 and weight.dtype == torch.float32
    plain = exact(weight).float()
    with torch.autocast("cpu", torch.bfloat16):
        want = F.linear(x, plain, bias)
    torch.testing.assert_close(y, want, atol=0.2, rtol=0.02)
    ours = torch.autograd.grad(y.float().sum(), [x, bias])
    theirs = torch.autograd.grad(want.float().sum(), [x, bias])
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype == torch.float32
        torch.testing.assert_close(a, b, atol=0.2, rtol=0.02)


# --------------------------------------------------------------------------------- F.embedding


@kinds
@dtypes
@pytest.mark.parametrize("group_size", [None, 4])
def test_embedding(kind: type[QuantizedWeight], dtype: torch.dtype, group_size: int | None) -> None:
    weight = make(kind, 130, 8, group_size, dtype)
    plain = weight.dequantize()
    for idx in (
        token_ids(3, 5, low=0, high=130),
        torch.arange(130),
        torch.tensor(129),
        torch.empty(2, 0, dtype=torch.long),
        torch.tensor([[0, 64]], dtype=torch.int32),
    ):
        ours = F.embedding(idx, weight)
        assert torch.equal(ours, F.embedding(idx, plain)) and type(ours) is Tensor
        assert torch.equal(F.embedding(idx, weight, padding_idx=3), ours)


@kinds
def test_embedding_refuses(kind: type[QuantizedWeight]) -> None:
    weight = make(kind)
    for idx in (6, 60, -1):  # 60 is a row of the filled-up block
        with pytest.raises(IndexError, match="6 rows"):
            F.embedding(torch.tensor([0, idx]), weight)
    with pytest.raises(ValueError, match=r"max_norm=1.0"):
        F.embedding(torch.tensor([0]), weight, max_norm=1.0)
    with pytest.raises(NotImplementedError, match=r"F\.embedding"):
        F.embedding(weight, torch.ones(6, 8))


# ------------------------------------------------------------------------------ being a tensor


@kinds
def test_detach_shares_and_clone_does_not(kind: type[QuantizedWeight]) -> None:
    weight = make(kind)
    for shared in (weight.detach(), weight.data, nn.Parameter(weight, requires_grad=False)):
        assert_same(shared, weight)
        assert isinstance(shared, QuantizedWeight)
        for a, b in zip(held(shared), held(weight), strict=True):
            assert a.data_ptr() == b.data_ptr()
    for copied in (weight.clone(), copy.deepcopy(weight), weight.to(weight.dtype, copy=True)):
        assert_same(copied, weight)
        for a, b in zip(held(copied), held(weight), strict=True):
            assert a.data_ptr() != b.data_ptr()


@kinds
@dtypes
def test_another_dtype_changes_scales_but_not_codes(
    kind: type[QuantizedWeight], dtype: torch.dtype
) -> None:
    weight = make(kind, dtype=torch.float64)
    other = weight.to(dtype)
    assert isinstance(other, kind) and other.dtype == dtype
    assert torch.equal(single_codes(other), single_codes(weight))
    assert torch.equal(other.parts()["scale"], weight.parts()["scale"].to(dtype))
    back = other.to(torch.float64).to(dtype)
    assert_same(back, other)
    for integer in (torch.int8, torch.long, torch.bool):
        with pytest.raises(ValueError, match=str(integer)):
            weight.to(integer)


@kinds
def test_meta(kind: type[QuantizedWeight]) -> None:
    meta = make(kind, dtype=torch.bfloat16).to("meta")
    assert isinstance(meta, kind) and meta.is_meta and meta.dtype == torch.bfloat16
    assert all(tensor.is_meta for tensor in held(meta))
    want_shapes = [tensor.shape for tensor in held(make(kind))]
    assert [tensor.shape for tensor in held(meta)] == want_shapes
    skeleton = kind.quantize(torch.empty(6, 8, device="meta"))
    assert [tensor.shape for tensor in held(skeleton)] == want_shapes
    empty = torch.empty_like(meta, device="cpu")
    assert not empty.is_meta and empty.dtype == torch.bfloat16
    assert [tensor.shape for tensor in held(empty)] == want_shapes
    assert empty.copy_(make(kind, dtype=torch.bfloat16)) is empty
    assert_same(empty, make(kind, dtype=torch.bfloat16))
    with pytest.raises(NotImplementedError):
        meta.to("cpu")
    layer = nn.Linear(8, 6)
    layer.weight = nn.Parameter(make(kind), requires_grad=False)
    layer.to_empty(device="meta")
    assert isinstance(layer.weight, kind) and layer.weight.is_meta
    layer.to_empty(device="cpu")
    assert isinstance(layer.weight, kind) and not held(layer.weight)[0].is_meta
    wide = torch.empty_like(make(kind), dtype=torch.float64)
    assert wide.dtype == torch.float64 and wide.parts()["scale"].dtype == torch.float64


@kinds
@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copy_takes_values_only(
    kind: type[QuantizedWeight],
    other: type[QuantizedWeight],
    group_size: int | None,
    dtype: torch.dtype,
) -> None:
    target, source = make(kind), other.quantize(numbers(6, 8, seed=5).to(dtype), group_size)
    before = [tensor.data_ptr() for tensor in held(target)]
    assert target.copy_(source) is target
    assert [tensor.data_ptr() for tensor in held(target)] == before  # in place
    assert type(target) is kind and target.dtype == torch.float32 and target.group_size == 8
    if kind is other and group_size is None:
        assert torch.equal(single_codes(target), single_codes(source))
        assert torch.equal(target.parts()["scale"], source.parts()["scale"].float())
    else:
        assert_same(target, kind.quantize(source.dequantize().float()))


@kinds
def test_copy_between_plain_and_quantised(kind: type[QuantizedWeight]) -> None:
    target, w = make(kind), numbers(6, 8, seed=5, dtype=torch.float64)
    target.copy_(w)
    assert_same(target, kind.quantize(w.float()))
    plain = torch.empty(6, 8, dtype=torch.float64)
    assert plain.copy_(target) is plain
    assert torch.equal(plain, target.dequantize().double())


@kinds
def test_copy_refuses_before_anything_changes(kind: type[QuantizedWeight]) -> None:
    target = make(kind)
    before = target.clone()
    plain = torch.ones(1, 8)
    for a, b, words in (
        (target, torch.ones(8), r"\(8,\) .* \(6, 8\)"),  # torch would broadcast it
        (target, make(kind, 1, 8), r"\(1, 8\) .* \(6, 8\)"),
        (torch.ones(2, 6, 8), target, r"\(6, 8\) .* \(2, 6, 8\)"),
        (target, torch.full((6, 8), math.inf), "not finite"),
    ):
        with pytest.raises(ValueError, match=words):
            a.copy_(b)
    with pytest.raises((ValueError, RuntimeError)):
        plain.copy_(target)
    assert_same(target, before)


@kinds
@pytest.mark.parametrize("parameter", [True, False])
def test_copies_and_pickles(kind: type[QuantizedWeight], parameter: bool) -> None:
    weight = make(kind, 70, 16, 8, torch.bfloat16)
    thing = nn.Parameter(weight, requires_grad=False) if parameter else weight
    file = io.BytesIO()
    torch.save({"weight": thing}, file)
    file.seek(0)
    for back in (
        copy.deepcopy(thing),
        pickle.loads(pickle.dumps(thing)),
        torch.load(file, weights_only=True)["weight"],
    ):
        assert_same(back, weight)
        assert isinstance(back, nn.Parameter) == parameter and not back.requires_grad
        assert torch.equal(back.dequantize(), weight.dequantize())
        assert held(back)[0].data_ptr() != held(weight)[0].data_ptr()


@pytest.mark.slow
def test_a_fresh_process_loads_it_with_weights_only(tmp_path: Path) -> None:
    saved = {kind.__name__: make(kind, 6, 32) for kind in KINDS}
    torch.save(saved, tmp_path / "weights.pt")
    torch.save({name: w.dequantize() for name, w in saved.items()}, tmp_path / "plain.pt")
    run = (
        "import torch, sys, lm_from_scratch.weights.quantize\n"
        "a, b = (torch.load(f, weights_only=True) for f in sys.argv[1:])\n"
        "assert all(torch.equal(a[name].dequantize(), b[name]) for name in b)\n"
        "print(*sorted(a), *(type(w).__name__ for w in a.values()))"
    )
    files = [str(tmp_path / "weights.pt"), str(tmp_path / "plain.pt")]
    done = subprocess.run(
        [sys.executable, "-c", run, *files], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["Int4Weight", "Int8Weight", "Int8Weight", "Int4Weight"]


@kinds
def test_it_prints_what_it_is(kind: type[QuantizedWeight]) -> None:
    weight = make(kind, dtype=torch.bfloat16)
    want = (
        f"{kind.__name__}(shape=(6, 8), dtype=torch.bfloat16, device='cpu', group_size=8, "
        f"nbytes={weight.nbytes})"
    )
    assert repr(weight) == str(weight) == f"{weight}" == want
    assert want in repr(nn.ParameterList([weight]).state_dict())


@kinds
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("aten.sum", lambda w: w.sum()),
        ("aten.mul.Tensor", lambda w: w * 2),
        ("aten.mul.Tensor", lambda w: 2 * w),
        ("aten.add.Tensor", lambda w: w + torch.ones(6, 8)),
        ("aten.add_.Tensor", lambda w: w.add_(1)),
        ("aten.zero_", lambda w: w.zero_()),
        ("aten.fill_", lambda w: w.fill_(1.0)),
        ("aten.normal_", lambda w: nn.init.normal_(w)),
        ("aten.t.default", lambda w: w.t()),
        ("aten.permute", lambda w: w.T),
        ("aten.transpose", lambda w: w.mT),
        ("aten.view", lambda w: w.view(-1)),
        ("aten.view", lambda w: w.reshape(8, 6)),
        ("aten.select", lambda w: w[0]),
        ("aten.unbind", lambda w: list(w)),
        ("aten.split", lambda w: w.chunk(2)),
        ("aten.cat", lambda w: torch.cat([w, w])),
        ("aten.stack", lambda w: torch.stack([w, torch.ones(6, 8)])),
        ("aten.mm", lambda w: torch.ones(3, 6) @ w),
        ("aten.equal", lambda w: torch.equal(w, w)),
        ("aten.linalg_vector_norm", lambda w: w.norm()),
        ("aten.isnan", lambda w: w.isnan()),
        ("aten.add_.Tensor", lambda w: torch.ones(6, 8).add_(w)),
        ("aten._foreach_add_", lambda w: torch._foreach_add_([w], 1.0)),
    ],
)
def test_every_other_operator_is_refused_by_name(
    kind: type[QuantizedWeight], name: str, call: Callable[[QuantizedWeight], object]
) -> None:
    weight = make(kind)
    before = weight.clone()
    with pytest.raises(NotImplementedError, match=f"{name}.* {kind.__name__}.*dequantize"):
        call(weight)
    assert_same(weight, before)


@kinds
def test_a_slice_gives_rows_as_plain_numbers(kind: type[QuantizedWeight]) -> None:
    weight = make(kind)
    for rows in (slice(2, 5), slice(0), slice(None, None, 2)):
        assert type(weight[rows]) is Tensor
        assert torch.equal(weight[rows], weight.dequantize()[rows])


@kinds
def test_memory_is_shared_with_other_processes(kind: type[QuantizedWeight]) -> None:
    layer = nn.Linear(8, 6)
    layer.weight = nn.Parameter(make(kind), requires_grad=False)
    layer.share_memory()
    assert isinstance(layer.weight, kind)
    assert all(tensor.is_shared() for tensor in held(layer.weight))
    assert_same(layer.weight, make(kind))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Int8Weight, torch.float32), (Int8Weight, torch.bfloat16), (Int4Weight, torch.bfloat16)],
)
def test_compile_in_one_graph(kind: type[QuantizedWeight], dtype: torch.dtype) -> None:
    layer = nn.Linear(64, 70, dtype=dtype).requires_grad_(False)
    layer.weight = nn.Parameter(make(kind, 70, 64, dtype=dtype), requires_grad=False)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = numbers(3, 64, seed=1, dtype=dtype)
    with torch.no_grad():
        tolerance = 1e-5 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(compiled(x), layer(x), atol=tolerance, rtol=tolerance)


# ---------------------------------------------------------------------------- a built model

MODELS: dict[str, Callable[[], CausalLM]] = {
    "gpt2": lambda: tiny_gpt2(n_embd=32),
    "qwen2": tiny_qwen2,
    "qwen2, tied": lambda: tiny_qwen2(tie_word_embeddings=True),
}
models = pytest.mark.parametrize("name", MODELS)
bits_and_groups = pytest.mark.parametrize(("bits", "group_size"), [(8, None), (8, 8), (4, 8)])


def embedding_of(model: CausalLM) -> nn.Parameter:
    return next(p for n, p in model.named_parameters() if "wte" in n or "embed_tokens" in n)


def plain_twin(model: nn.Module) -> nn.Module:
    """A model with plain weights that were rounded by the formula."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        for key, p in module._parameters.items():
            if isinstance(p, QuantizedWeight):
                module._parameters[key] = nn.Parameter(exact(p).to(p.dtype), requires_grad=False)
    assert not any(isinstance(p, QuantizedWeight) for p in twin.parameters())
    return twin


@models
@bits_and_groups
def test_logits_and_gradients_are_those_of_the_rounded_weights(
    name: str, bits: int, group_size: int | None
) -> None:
    model = MODELS[name]().double()
    idx = token_ids(2, 11)
    before = model(idx).detach()
    want_names = {
        n for n, p in model.named_parameters()
        if p.dim() == 2 and (("wpe" not in n and "embed_tokens" not in n) or p is model.head.weight)
    }  # fmt: skip
    quantize_(model, bits, group_size)
    found = {n for n, p in model.named_parameters() if isinstance(p, QuantizedWeight)}
    assert found == want_names == set(quantized_weights(model))
    twin = plain_twin(model)
    for ours, want in zip(
        [p for p in model.parameters() if p.requires_grad],
        [p for p in twin.parameters() if p.requires_grad],
        strict=True,
    ):
        assert torch.equal(ours, want)
    ours, want = model(idx), twin(idx)
    torch.testing.assert_close(ours, want, atol=1e-10, rtol=0)
    assert (ours - before).abs().max() > 1e-3
    ours.cos().sum().backward()
    want.cos().sum().backward()
    grads = {n: p.grad for n, p in twin.named_parameters() if p.requires_grad}
    assert grads and not any(n in grads for n in found)
    for n, p in model.named_parameters():
        if n in grads:
            torch.testing.assert_close(p.grad, grads[n], atol=1e-8, rtol=1e-8)
        else:
            assert p.grad is None and not p.requires_grad


@models
@bits_and_groups
def test_dequantize_gives_a_plain_model_with_the_same_logits(
    name: str, bits: int, group_size: int | None
) -> None:
    model = MODELS[name]().double()
    kinds_before = {n: (type(p), p.shape) for n, p in model.named_parameters()}
    quantize_(model, bits, group_size)
    logits = model(token_ids(2, 5)).detach()
    objects = {n: id(p) for n, p in model.named_parameters()}
    dequantize_(model)
    assert {n: (type(p), p.shape) for n, p in model.named_parameters()} == kinds_before
    assert {n: id(p) for n, p in model.named_parameters()} == objects
    assert not quantized_weights(model)
    torch.testing.assert_close(model(token_ids(2, 5)), logits, atol=1e-10, rtol=0)
    dequantize_(model)  # nothing to do


@pytest.mark.parametrize("make_head", [SequenceClassifier, TokenClassifier])
@pytest.mark.parametrize("bits", [8, 4])
def test_classifiers(make_head: Callable[..., nn.Module], bits: int) -> None:
    model = make_head(MODELS["gpt2"]().backbone, 5).double().eval()
    quantize_(model, bits, 8)
    kind = Int8Weight if bits == 8 else Int4Weight
    assert isinstance(model.score.weight, kind)
    assert type(model.transformer.wte.weight) is nn.Parameter  # there is no head to share it
    idx = token_ids(3, 7)
    torch.testing.assert_close(model(idx), plain_twin(model)(idx), atol=1e-10, rtol=0)


@models
@pytest.mark.parametrize("bits", [8, 4])
def test_generation_with_a_cache_equals_the_full_pass(name: str, bits: int) -> None:
    model = MODELS[name]().double()
    quantize_(model, bits, 8)
    prompts = token_ids(2, 4).tolist()
    texts = complete(generate(model, prompts, 6, GREEDY))
    with torch.no_grad():
        for prompt, text in zip(prompts, texts, strict=True):
            row = prompt + text
            assert model(torch.tensor([row]))[0, 3:-1].argmax(-1).tolist() == text


@models
@pytest.mark.parametrize("bits", [8, 4])
def test_a_model_is_copied_and_pickled(name: str, bits: int) -> None:
    model = MODELS[name]()
    quantize_(model, bits, 8)
    idx = token_ids(2, 5)
    tied = model.head.weight is embedding_of(model)
    assert tied == (name != "qwen2")
    with torch.no_grad():
        want = model(idx)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(idx), want)
            assert (twin.head.weight is embedding_of(twin)) == tied


@pytest.mark.parametrize("name", ["gpt2", "qwen2, tied"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_tied_head_stays_tied_and_an_optimizer_holds_it(name: str, bits: int) -> None:
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    held_before = [id(p) for p in optimizer.param_groups[0]["params"]]
    model(token_ids(2, 5)).sum().backward()
    quantize_(model, bits, 8)
    embedding = embedding_of(model)
    assert isinstance(embedding, QuantizedWeight) and embedding is model.head.weight
    assert isinstance(embedding, nn.Parameter) and not embedding.requires_grad
    assert [id(p) for p in model.parameters()] == held_before
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == held_before
    assert embedding.grad is None
    # the norms and biases still train, and nothing else does
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model(token_ids(2, 5)).logsumexp(-1).sum().backward()
    optimizer.step()
    for n, p in model.named_parameters():
        if isinstance(p, QuantizedWeight):
            assert_same(p, before[n])
        else:
            assert not torch.equal(p, before[n]), n


def test_state_dict_and_a_walk_to_another_dtype() -> None:
    model = MODELS["gpt2"]()
    quantize_(model, 8)
    state = model.state_dict()
    weight = model.transformer.h[0].mlp.c_fc.weight
    name = "transformer.h.0.mlp.c_fc.weight"
    assert_same(state[name], weight)
    assert state[name].packed is weight.packed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    codes = weight.codes.clone()
    model.bfloat16()
    weight = model.transformer.h[0].mlp.c_fc.weight
    assert isinstance(weight, Int8Weight) and weight.dtype == weight.scale.dtype == torch.bfloat16
    assert torch.equal(weight.codes, codes)
    assert any(p is weight for p in optimizer.param_groups[0]["params"])
    with torch.no_grad():
        assert model(token_ids(1, 3)).dtype == torch.bfloat16
    assert model.head.weight is model.transformer.wte.weight


def test_select_by_name() -> None:
    model = MODELS["gpt2"]()
    quantize_(model, 4, 8, select=lambda name: "mlp" in name)
    for n, p in model.named_parameters():
        assert isinstance(p, Int4Weight) == ("mlp" in n and n.endswith("weight")), n
    quantize_(model, 8, select=lambda name: ".0.attn" in name)  # the others, later
    assert isinstance(model.transformer.h[0].attn.c_attn.weight, Int8Weight)
    assert type(model.transformer.h[1].attn.c_attn.weight) is nn.Parameter
    assert type(model.transformer.wte.weight) is nn.Parameter
    assert model(token_ids(1, 3)).isfinite().all()


def spoil(model: nn.Module) -> None:
    with torch.no_grad():
        model.transformer.h[2].mlp.c_proj.weight[3, 1] = math.nan


def alive_view(model: nn.Module) -> None:
    model.kept = model.transformer.h[2].mlp.c_proj.weight.view(-1)


@pytest.mark.parametrize(
    ("prepare", "options", "words"),
    [
        (spoil, {}, r"h\.2\.mlp\.c_proj\.weight: .* not finite"),
        (lambda m: None, {"bits": 3}, r"bits=3 .* \[8, 4\]"),
        (lambda m: None, {"group_size": 5}, r"wte\.weight: .* group_size=5"),
        (lambda m: None, {"group_size": 64}, r"32 numbers .* group_size=64"),
        (lambda m: None, {"bits": 4}, r"mlp\.c_proj\.weight: .*groups"),
        (lambda m: None, {"select": lambda name: False}, "select chose none of the weights .*wte"),
        (
            lambda m: None,
            {"select": lambda name: "wpe" in name},
            "select chose none of the weights .*wte",
        ),
        (quantize_, {}, r"wte\.weight: .* Int8Weight already"),
        (lambda m: quantize_(m, 8, select=lambda n: "h.2" in n), {}, "Int8Weight already"),
        (use_onednn_, {}, "c_attn is a OneDNNLinear: what else reads its weight"),
        (pack, {}, "c_attn is a PackedLinear: what else reads its weight"),
        (pack, {"select": lambda n: "wte" in n}, "head computes with .*Packed"),
        (alive_view, {}, r"h\.2\.mlp\.c_proj\.weight cannot be swapped"),
    ],
)
def test_all_or_none(
    prepare: Callable[[nn.Module], None], options: dict[str, object], words: str
) -> None:
    # 72 is no multiple of 64, which is the default of 4 bits
    model = tiny_gpt2(n_embd=32, intermediate_size=72)
    if prepare is pack:
        model.requires_grad_(False)
    prepare(model)
    before = snapshot(model)
    with pytest.raises(ValueError, match=words):
        quantize_(model, **options)
    assert_unchanged(model, before)


def test_a_model_without_a_linear_map() -> None:
    with pytest.raises(ValueError, match=r"none of the weights \[\]"):
        quantize_(nn.Sequential(nn.LayerNorm(3)))
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    quantize_(net)
    assert [isinstance(p, Int8Weight) for p in net.parameters()] == [True, False, True, False]
    assert net(torch.ones(3, 8)).shape == (3, 2)


def test_a_layer_that_reads_its_linear_map_in_another_way_is_refused() -> None:
    """nn.MultiheadAttention takes the weight of its ``out_proj``, and never calls it."""
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    before = snapshot(layer)
    with pytest.raises(ValueError, match=r"self_attn\.out_proj is a NonDynamically"):
        quantize_(layer)
    assert_unchanged(layer, before)
    quantize_(layer, select=lambda name: "out_proj" not in name)
    x = torch.randn(3, 5, 8)
    assert layer.train()(x).shape == x.shape


@pytest.mark.parametrize(("K", "fits"), [(100, "50, 100"), (7, "7")])
def test_a_group_that_does_not_fit_names_those_that_do(K: int, fits: str) -> None:
    with pytest.raises(ValueError, match=rf"group_size=64; sizes that fit are \[.*{fits}\]"):
        Int8Weight.quantize(torch.ones(3, K), 64)


# ------------------------------------------------------------------ what torch does to a weight


@kinds
def test_a_compiled_slice_of_a_fused_projection(kind: type[QuantizedWeight]) -> None:
    """Not aligned: torch's int8 kernel crashed the process."""
    weight = make(kind, 64, 64, 64, torch.bfloat16)

    def part(h: Tensor) -> Tensor:
        return F.linear((h * 2).split([8, 64], dim=-1)[1], weight)

    h = numbers(1, 72, dtype=torch.bfloat16)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(part, fullgraph=True, backend="aot_eager")(h)
        torch.testing.assert_close(compiled, part(h), rtol=0.02, atol=0.2)


def test_codes_at_any_address() -> None:
    """A file read by torch.load keeps the place of a view: torch's kernel crashed on it."""
    weight = make(Int8Weight, 64, 64, 64, torch.bfloat16)
    memory = torch.zeros(1 + weight.codes.numel(), dtype=torch.int8)
    memory[1:] = weight.codes.flatten()
    moved = Int8Weight.wrap((64, 64), 64, codes=memory[1:].view(64, 64), scale=weight.scale)
    x = numbers(2, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(F.linear(x, moved), F.linear(x, weight), rtol=0.02, atol=0.2)


@kinds
def test_assigning_data_is_refused(kind: type[QuantizedWeight]) -> None:
    layer = nn.Linear(64, 10)
    layer.weight = nn.Parameter(make(kind, 10, 64), requires_grad=False)
    before = snapshot(layer)
    with pytest.raises(ValueError, match=r"weight\.data = "):
        layer.weight.data = torch.zeros(10, 64)
    assert_unchanged(layer, before)


@kinds
def test_an_alias_shares(kind: type[QuantizedWeight]) -> None:
    weight = make(kind, 64, 64)
    alias = torch.ops.aten.alias(weight)
    assert type(alias) is kind and alias.codes.data_ptr() == weight.codes.data_ptr()


@kinds
def test_indices_that_are_no_indices(kind: type[QuantizedWeight]) -> None:
    for dtype in (torch.bool, torch.uint8, torch.float32):
        with pytest.raises(ValueError, match=f"{dtype}.*int64 or int32"):
            F.embedding(torch.ones(64, dtype=dtype), make(kind, 64, 64))


@pytest.mark.parametrize(
    ("bits", "group_size"), [(8.0, None), ([8], None), (True, None), (8, True), (8, 32.0)]
)
def test_numbers_that_are_no_integers(bits: object, group_size: object) -> None:
    net = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(ValueError, match="must be"):
        quantize_(net, bits, group_size)  # type: ignore[arg-type]
    assert type(net[0].weight) is nn.Parameter


@kinds
def test_autocast_leaves_float64_alone(kind: type[QuantizedWeight]) -> None:
    weight, x = make(kind, 64, 64, dtype=torch.float64), numbers(3, 64, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, weight)
    assert torch.equal(y, F.linear(x, weight))


@kinds
def test_autocast_decodes_before_it_rounds(kind: type[QuantizedWeight]) -> None:
    """As the chunked loss does, and as plain weights are treated."""
    weight, x = make(kind, 64, 64), numbers(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(F.linear(x, weight), F.linear(x, weight.dequantize()))


def test_a_parametrised_map_is_refused_and_a_wrapped_head_found() -> None:
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    with pytest.raises(ValueError, match="0 is a ParametrizedLinear"):
        quantize_(net)
    assert type(net[1].weight) is nn.Parameter
    model = tiny_gpt2()
    quantize_(nn.ModuleDict({"inner": model}))
    assert isinstance(model.head.weight, Int8Weight)
