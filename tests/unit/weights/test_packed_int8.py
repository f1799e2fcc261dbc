"""Packed 8-bit weights: products in 8 bits, each row of a batch for itself."""

import copy
import io
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids
from torch import Tensor, nn
from unchanged import assert_same

from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.weights import packed_int8
from lm_from_scratch.weights.int8 import Int8Weight
from lm_from_scratch.weights.packed_int8 import PackedInt8Weight, largest_code, use_packed_int8_
from lm_from_scratch.weights.quantize import dequantize_, quantize_, quantized_weights

here_only = pytest.mark.skipif(not largest_code(), reason="torch has no int8 kernel here")
modes = pytest.mark.parametrize("weight_only", [False, True])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def make(
    N: int = 40, K: int = 96, weight_only: bool = False, dtype: torch.dtype = torch.float32
) -> PackedInt8Weight:
    return PackedInt8Weight.of(Int8Weight.quantize(numbers(N, K, dtype=dtype)), weight_only)


def check_products() -> None:
    """Both ways against the formula in float64. Also run as another processor."""
    top = largest_code()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        eps = torch.finfo(dtype).eps
        for N, K, M in [(40, 96, 1), (7, 5, 3), (130, 480, 9), (64, 1024, 70), (1, 1, 2)]:
            x, bias = numbers(M, K, seed=1, dtype=dtype), numbers(N, seed=2, dtype=dtype)
            x[0] *= 1e-3
            weight = make(N, K, dtype=dtype)
            W = weight.codes.double() * weight.scale.double()
            step = x.double().abs().amax(1, keepdim=True) / top
            rounded = (x.double() / step).round() * step
            size = x.double().abs() @ W.abs().T + bias.double().abs()
            half = step / 2 * W.abs().sum(1)  # what rounding x may do to a sum
            for weight_only in (False, True):
                y = F.linear(x, PackedInt8Weight.of(weight, weight_only), bias)
                assert y.dtype == dtype and y.is_contiguous()
                exact = x.double() @ W.T + bias.double()
                error = (y.double() - exact).abs()
                if weight_only:
                    assert (error <= 2 * eps * size + 2**-12 * half).all(), (dtype, N, K, M)
                else:
                    assert (error <= half + 2 * eps * size).all(), (dtype, N, K, M)
                    if not weight.packed.multiplies:
                        continue
                    near = (y.double() - rounded @ W.T - bias.double()).abs()
                    assert near.mean() <= 0.02 * half.mean() + eps * size.mean()


@here_only
def test_products() -> None:
    check_products()


# ----------------------------------------------------------------------------- rows of a batch

KINDS_OF_ROW = ["plain", "huge", "tiny", "zero", "nan", "inf", "constant"]


def row_of(kind: str, K: int, seed: int) -> Tensor:
    row = numbers(K, seed=seed)
    match kind:
        case "huge":
            row *= 1e30
        case "tiny":
            row *= 1e-30
        case "zero":
            row *= 0
        case "nan":
            row[seed % K] = math.nan
        case "inf":
            row[seed % K] = -math.inf
        case "constant":
            row[:] = -3.0
    return row


@modes
@dtypes
@pytest.mark.parametrize("K", [96, 512])  # of each kernel
@given(kinds=st.lists(st.sampled_from(KINDS_OF_ROW), min_size=1, max_size=9))
def test_a_row_of_a_batch_is_what_it_is_alone(
    weight_only: bool, dtype: torch.dtype, K: int, kinds: list[str]
) -> None:
    weight = PACKED[dtype, weight_only, K]
    x = torch.stack([row_of(kind, K, seed) for seed, kind in enumerate(kinds)]).to(dtype)
    y = F.linear(x, weight)
    alone = torch.cat([F.linear(row[None], weight) for row in x])
    assert torch.equal(y.nan_to_num(nan=7.5), alone.nan_to_num(nan=7.5))
    assert y.isfinite().all(1).tolist() == x.isfinite().all(1).tolist()
    assert torch.equal(F.linear(x.view(1, -1, K), weight)[0].nan_to_num(), y.nan_to_num())
    zero = (x == 0).all(1)
    assert (y[zero] == 0).all()


PACKED = {
    (dtype, weight_only, K): make(40, K, weight_only, dtype)
    for K in (96, 512)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for weight_only in (False, True)
}


@modes
def test_a_batch_of_texts_is_the_texts(weight_only: bool) -> None:
    """The other products of a model are attention's, which differ by their last bits alone."""
    model = tiny_qwen2().eval()
    quantize_(model, weight_only=weight_only)
    idx = token_ids(5, 9)
    with torch.no_grad():
        together, alone = model(idx), torch.cat([model(row[None]) for row in idx])
    # a last bit can move an activation to the next code
    assert (together - alone).abs().mean() <= (1e-5 if weight_only else 1e-3) * alone.abs().mean()


@here_only
def test_several_threads_share_a_weight() -> None:
    weight, x = make(300, 512), numbers(64, 512)
    want = F.linear(x, weight)
    with ThreadPoolExecutor(4) as pool:
        for y in pool.map(lambda _: F.linear(x, weight), range(40)):
            assert torch.equal(y, want)


# ------------------------------------------------------------------------------ being a tensor


@modes
def test_it_holds_the_same_parts_and_numbers(weight_only: bool) -> None:
    plain = Int8Weight.quantize(numbers(40, 96))
    weight = PackedInt8Weight.of(plain, weight_only)
    for name, part in plain.parts().items():
        assert torch.equal(weight.parts()[name], part)
    assert torch.equal(weight.dequantize(), plain.dequantize())
    idx = torch.tensor([3, 39, 3])
    assert torch.equal(F.embedding(idx, weight), F.embedding(idx, plain))
    assert torch.equal(weight[2:5], plain[2:5])


@here_only
def test_nbytes_counts_what_is_held_twice() -> None:
    weight = make(64, 1024)
    assert weight.nbytes == 64 * 1024 + 4 * 64
    assert make(64, 768).nbytes == make(64, 1024).nbytes
    assert make(64, 340).nbytes == 64 * 340 + 4 * 64  # too short to fill up
    F.embedding(torch.tensor([1]), weight)
    assert weight.nbytes == 2 * 64 * 1024 + 4 * 64


@modes
def test_copies_and_pickles(weight_only: bool) -> None:
    weight = make(weight_only=weight_only, dtype=torch.bfloat16)
    x, file = numbers(3, 96, dtype=torch.bfloat16), io.BytesIO()
    torch.save(nn.Parameter(weight, requires_grad=False), file)
    file.seek(0)
    for back in (
        copy.deepcopy(weight), weight.clone(), weight.detach(), weight.float().bfloat16(),
        pickle.loads(pickle.dumps(weight)), torch.load(file, weights_only=True),
        copy.deepcopy(nn.Parameter(weight, requires_grad=False)),
    ):  # fmt: skip
        assert_same(back, weight)
        assert back.weight_only == weight_only and back.nbytes == weight.nbytes
        assert torch.equal(F.linear(x, back), F.linear(x, weight))


def test_values_are_copied_into_what_is_packed() -> None:
    weight, x = make(), numbers(3, 96)
    shared, apart = weight.detach(), weight.clone()
    before = F.linear(x, weight)
    for source in (numbers(40, 96, seed=5), Int8Weight.quantize(numbers(40, 96, seed=5))):
        weight.copy_(apart)
        weight.copy_(source)
        new = F.linear(x, PackedInt8Weight.of(Int8Weight.quantize(numbers(40, 96, seed=5))))
        assert torch.equal(F.linear(x, weight), new) and torch.equal(F.linear(x, shared), new)
        assert torch.equal(F.linear(x, apart), before)


@modes
def test_the_gradient_is_that_of_the_matrix(weight_only: bool) -> None:
    weight = make(weight_only=weight_only)
    x, bias = numbers(3, 96).requires_grad_(), numbers(40).requires_grad_()
    y = F.linear(x, weight, bias)
    with torch.no_grad():
        assert torch.equal(F.linear(x, weight, bias), y)
    ours = torch.autograd.grad(y.sum(), [x, bias])
    want = torch.autograd.grad(F.linear(x, weight.dequantize(), bias).sum(), [x, bias])
    for a, b in zip(ours, want, strict=True):
        torch.testing.assert_close(a, b)


@modes
def test_compile_in_one_graph(weight_only: bool) -> None:
    layer = nn.Linear(96, 40).requires_grad_(False)
    layer.weight = nn.Parameter(make(weight_only=weight_only), requires_grad=False)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = numbers(3, 96)
    with torch.no_grad():
        want = F.linear(x, layer.weight.dequantize(), layer.bias)
        torch.testing.assert_close(compiled(x), want, atol=1e-5, rtol=1e-5)


def test_meta_and_back() -> None:
    meta = make().to("meta")
    assert isinstance(meta, PackedInt8Weight) and meta.is_meta
    empty = torch.empty_like(meta, device="cpu")
    empty.copy_(make())
    x = numbers(3, 96)
    assert torch.equal(F.linear(x, empty), F.linear(x, make()))


@modes
def test_without_a_kernel_the_weight_is_decoded(
    weight_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_int8, "largest_code", lambda: 0)
    weight, x = make(weight_only=weight_only), numbers(3, 96)
    assert torch.equal(F.linear(x, weight), F.linear(x, weight.dequantize()))
    assert weight.nbytes == 40 * 96 + 40 * 4


def test_float64_is_not_rounded() -> None:
    weight, x = make().double(), numbers(3, 96).double()
    assert torch.equal(F.linear(x, weight), F.linear(x, weight.dequantize()))


# ------------------------------------------------------------------------------- built models


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_qwen2])
@modes
def test_a_model_goes_to_a_file_and_back(build, weight_only: bool, tmp_path: Path) -> None:
    model = build().eval()
    tied = model.head.weight is next(iter(model.parameters()))
    quantize_(model, weight_only=weight_only)
    save_pretrained(model, tmp_path / "m")
    back = from_pretrained(tmp_path / "m")
    found = quantized_weights(back)
    assert found and all(isinstance(w, PackedInt8Weight) for w in found.values())
    assert {w.weight_only for w in found.values()} == {weight_only}
    assert (back.head.weight is next(iter(back.parameters()))) == tied
    idx = token_ids(2, 5)
    with torch.no_grad():
        assert torch.equal(back(idx), model(idx))
    use_packed_int8_(back, not weight_only)
    assert {w.weight_only for w in quantized_weights(back).values()} == {not weight_only}
    assert not torch.equal(back(idx), model(idx)) or not largest_code()
    dequantize_(back)
    assert not quantized_weights(back)


def test_groups_and_4_bits_are_not_packed() -> None:
    model = tiny_gpt2()
    quantize_(model, 8, 4, select=lambda name: ".0." in name)
    quantize_(model, 4, 4, select=lambda name: ".1." in name)
    quantize_(model, 8, select=lambda name: ".2." in name)
    for name, weight in quantized_weights(model).items():
        assert isinstance(weight, PackedInt8Weight) == (".2." in name)


@pytest.mark.parametrize("where", ["autocast", "float64", "bfloat16", "meta"])
def test_the_largest_code_is_that_of_the_processor(where: str) -> None:
    before, largest_code_here = torch.get_default_dtype(), largest_code()
    largest_code.cache_clear()
    try:
        if where == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                assert largest_code() == largest_code_here
        elif where == "meta":
            with torch.device("meta"):
                assert largest_code() == largest_code_here
        else:
            torch.set_default_dtype(getattr(torch, where))
            assert largest_code() == largest_code_here
    finally:
        torch.set_default_dtype(before)
        largest_code.cache_clear()


def test_a_product_in_another_dtype_keeps_no_second_copy() -> None:
    weight = PackedInt8Weight.of(Int8Weight.quantize(torch.randn(32, 512).double()))
    held = weight.nbytes
    F.linear(torch.randn(2, 512).double(), weight)
    assert weight.nbytes == held == weight.clone().nbytes
