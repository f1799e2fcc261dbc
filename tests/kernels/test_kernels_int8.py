"""kernels/int8.py: the products of an 8-bit weight, and a model whose weights have them."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import (
    DEVICE,
    check,
    check_compiled,
    check_operator,
    each_dtype_of_which_float16_is_slow,
    numbers,
    poisoned,
    strided,
)
from tiny_models import tiny_qwen2, token_ids
from torch import Tensor, nn

from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.kernels import int8
from lm_from_scratch.kernels.int8 import (
    FEW,
    MANY,
    KernelInt8Weight,
    int8_linear,
    linear,
    use_int8_kernel_,
)
from lm_from_scratch.weights import quantized_weight
from lm_from_scratch.weights.int4 import Int4Weight
from lm_from_scratch.weights.int8 import Int8Weight
from lm_from_scratch.weights.quantize import dequantize_, quantize_, quantized_weights

#: More than a tile in each direction, and none a multiple of anything.
N, K = MANY["BLOCK_N"] + 7, FEW["BLOCK_K"] + 5


def of_parts(function: Any) -> Any:
    """A product as a function of plain tensors, which the checks can poison and differentiate."""

    def product(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        size = codes.shape[1] // scale.shape[1]
        weight = Int8Weight.wrap(codes.shape, size, codes=codes, scale=scale)
        return function(x, weight, bias)

    return product


kernel, reference = of_parts(linear), of_parts(quantized_weight.linear)


def parts(n: int, k: int, group_size: int | None = None) -> tuple[Tensor, Tensor]:
    weight = Int8Weight.quantize(numbers(n, k, seed=1, scale=0.25, grad=False), group_size)
    return weight.codes, weight.scale


def make(group_size: int | None = None, dtype: torch.dtype = torch.float32) -> Int8Weight:
    weight = numbers(33, 64, seed=1, scale=0.25, grad=False).to(DEVICE, dtype)
    return Int8Weight.quantize(weight, group_size)


@each_dtype_of_which_float16_is_slow
@pytest.mark.parametrize("shape", [(K,), (1, K), (16, K), (2, 9, K), (131, K)], ids=str)
def test_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """One row, as many as a small tile has, more than it has, more than a large one has."""
    args = numbers(*shape), *parts(N, K), numbers(N, seed=2)
    check(kernel, reference, *args, dtype=dtype, name="int8 linear")


@each_dtype_of_which_float16_is_slow
@pytest.mark.parametrize("group_size", [16, 32, 48, 64, 192])
def test_groups(group_size: int, dtype: torch.dtype) -> None:
    for rows in (3, 20):
        args = numbers(rows, 192), *parts(33, 192, group_size)
        check(kernel, reference, *args, dtype=dtype, name="int8 linear")


@each_dtype_of_which_float16_is_slow
def test_takes_any_strides(dtype: torch.dtype) -> None:
    for group_size in (None, 32):
        args = numbers(5, 64), *parts(33, 64, group_size), numbers(33, seed=2)
        check(kernel, reference, *args, dtype=dtype, name="int8 linear", layout=strided)


@each_dtype_of_which_float16_is_slow
def test_large_tiles(dtype: torch.dtype) -> None:
    """Which need a multiple of 16 numbers in a row."""
    k = MANY["BLOCK_K"] + 16
    args = numbers(MANY["BLOCK_M"] + 1, k), *parts(N, k), numbers(N, seed=2)
    check(kernel, reference, *args, dtype=dtype, name="int8 linear")


def test_a_bias_of_any_strides() -> None:
    x, memory = numbers(3, 64, grad=False).float().to(DEVICE), torch.arange(66.0, device=DEVICE)
    for bias in (memory[::2], memory[1:2].expand(33)):
        torch.testing.assert_close(linear(x, make(), bias), linear(x, make()) + bias)


@each_dtype_of_which_float16_is_slow
def test_every_code(dtype: torch.dtype) -> None:
    """Each of the 255 codes, and -128, which quantize() does not make, is cast exactly."""
    codes = torch.arange(-128, 128).to(torch.int8)[:, None].expand(256, 16).contiguous()
    scale = torch.ones(256, 1, dtype=dtype)
    weight = Int8Weight.wrap((256, 16), 16, codes=codes.to(DEVICE), scale=scale.to(DEVICE))
    y = linear(torch.eye(16, dtype=dtype, device=DEVICE)[:1], weight)
    assert y[0].tolist() == list(range(-128, 128))


def test_decodes_as_the_reference_does() -> None:
    """With groups, a row of the identity gives the decoded numbers, bit by bit."""
    for dtype in (torch.float32, torch.float16):
        weight = make(16, dtype)
        y = linear(torch.eye(64, dtype=dtype, device=DEVICE), weight)
        assert torch.equal(y, weight.dequantize().T)


def test_a_row_of_zeros() -> None:
    weight = Int8Weight.quantize(torch.zeros(3, 16, device=DEVICE))
    assert torch.equal(
        linear(torch.ones(2, 16, device=DEVICE), weight), weight.scale.new_zeros(2, 3)
    )


def test_nothing_to_do() -> None:
    x = torch.empty(2, 0, 64, device=DEVICE, requires_grad=True)
    bias = torch.ones(33, device=DEVICE, requires_grad=True)
    y = linear(x, make(), bias)
    y.sum().backward()
    assert y.shape == (2, 0, 33) and x.grad.shape == x.shape and not bias.grad.any()


def test_autocast() -> None:
    x = numbers(3, 64, grad=False).float().to(DEVICE)
    for weight in (make(), make(16)):
        with torch.autocast(DEVICE, torch.float16):
            ours, theirs = linear(x, weight), quantized_weight.linear(x, weight)
        assert ours.dtype == torch.float16
        torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0)


def test_is_one_operator() -> None:
    x = numbers(5, 64).detach().float().to(DEVICE)
    bias = numbers(33).detach().float().to(DEVICE)
    rows, groups = make(), make(16)
    check_operator(int8_linear, x, rows.codes, rows.scale, None)
    check_operator(int8_linear, strided(x)[None], groups.codes, groups.scale, bias)
    layer = nn.Linear(64, 33, device=DEVICE).requires_grad_(False)
    layer.weight = nn.Parameter(make(16), requires_grad=False)
    assert use_int8_kernel_(layer) == 1
    check_compiled(layer, x.requires_grad_())


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        (torch.ones(1), "bias is torch.float32 of shape (1,), x torch.float32, and the weight has"),
        (torch.ones(5), "of shape (5,), x torch.float32, and the weight has 33 rows: they must"),
        (torch.ones(()), "of shape ()"),
        (torch.ones(2, 33), "of shape (2, 33)"),
        (torch.ones(33).half(), "bias is torch.float16 of shape (33,), x torch.float32"),
        (torch.ones(33).int(), "bias is torch.int32 of shape (33,), x torch.float32"),
        (torch.ones(33, device="meta"), "bias on meta; they must be on one"),
    ],
)
def test_refuses_a_bias(bias: Tensor, words: str) -> None:
    with pytest.raises(ValueError) as error:
        linear(torch.ones(2, 64, device=DEVICE), make(), bias if bias.is_meta else bias.to(DEVICE))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("x", "weight", "words"),
    [
        (torch.ones(2, 64), make(8), "group_size=8; the kernel takes multiples of 16, or a whole"),
        (torch.ones(2, 64), torch.ones(33, 64), "weight has the class Tensor; the kernel takes"),
        (torch.ones(2, 64), Int4Weight.quantize(torch.ones(33, 64)), "has the class Int4Weight;"),
        (torch.ones(2, 64).half(), make(), "x is torch.float16 with 64 features, the weight"),
        (torch.ones(2, 63), make(), "x is torch.float32 with 63 features, the weight"),
        (torch.ones(2, 64).double(), make().double(), "x is torch.float64; kernels compute in"),
        (torch.ones(2, 64), make().to("meta"), "codes on meta; they must be on one"),
    ],
)
def test_refuses(x: Tensor, weight: Tensor, words: str) -> None:
    with pytest.raises(ValueError) as error:
        linear(x.to(DEVICE), weight)  # type: ignore[arg-type]
    assert words in str(error.value)


# ---------------------------------------------------------------------------- a built model


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module, Tensor]:
    """A model with 8-bit weights and a tied head, the same with the kernel, and tokens."""
    plain = tiny_qwen2(n_layer=1, tie_word_embeddings=True).to(DEVICE)
    quantize_(plain, 8, weight_only=True)  # as the kernel is
    ours = copy.deepcopy(plain)
    assert use_int8_kernel_(ours) == 8
    return plain, ours, token_ids(2, 5).to(DEVICE)


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def by_kernel(model: nn.Module) -> list[bool]:
    return [isinstance(w, KernelInt8Weight) for w in quantized_weights(model).values()]


@torch.no_grad()
def test_a_model_computes_with_it(
    pair: tuple[nn.Module, nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours, idx = pair
    calls = []

    def counted(*args: Any) -> Tensor:
        calls.append(args)
        return int8_linear(*args)

    monkeypatch.setattr(int8, "int8_linear", counted)
    with poisoned():
        same(ours(idx), plain(idx))
    assert len(calls) == 8  # 7 maps and the head; the embedding is looked up
    assert use_int8_kernel_(ours) == 8  # again: nothing is lost
    same(ours(idx), plain(idx))
    tied = ours.get_parameter("model.embed_tokens.weight")
    assert tied is ours.head.weight and isinstance(tied, KernelInt8Weight)
    assert torch.equal(F.embedding(idx, tied), F.embedding(idx, plain.head.weight))


def test_adapters_get_their_gradients(pair: tuple[nn.Module, nn.Module, Tensor]) -> None:
    from lm_from_scratch.weights.lora import add_lora_

    gradients = []
    for model in pair[:2]:
        add_lora_(model, rank=2)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_b" in name:
                    p.fill_(0.1)
        model(pair[2]).sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert gradients[0]
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_copies_and_conversions_keep_it(pair: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, ours, idx = pair
    copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours).to(DEVICE)]
    for model in copies:
        assert all(by_kernel(model))
        assert torch.equal(model(idx), ours(idx))
    low = ours.half()
    assert all(by_kernel(low)) and low(idx).dtype == torch.float16


@torch.no_grad()
def test_a_file_knows_nothing_of_it(
    pair: tuple[nn.Module, nn.Module, Tensor], tmp_path: Path
) -> None:
    plain, ours, idx = pair
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    assert b"KernelInt8Weight" not in file.getvalue()
    file.seek(0)
    state = torch.load(file, weights_only=True)
    plain.load_state_dict(state)
    ours.load_state_dict(state)
    assert all(by_kernel(ours)) and not any(by_kernel(plain))
    for w, v in zip(*(quantized_weights(m).values() for m in (ours, plain)), strict=True):
        assert torch.equal(w.parts()["codes"], v.parts()["codes"])
        assert torch.equal(w.parts()["scale"], v.parts()["scale"])
    same(ours(idx), plain(idx))
    for model in (plain, ours):
        save_pretrained(model, tmp_path / str(len(by_kernel(model))) / type(model).__name__)
    back = from_pretrained(tmp_path / "8" / type(ours).__name__)
    assert not any(by_kernel(back)) and len(by_kernel(back)) == 8


def test_codes_travel_as_they_are() -> None:
    """Between the two classes codes are copied, not decoded and rounded again."""
    coarse = Int8Weight.wrap(
        (1, 2), 2, codes=torch.tensor([[2, 1]], dtype=torch.int8), scale=torch.tensor([[0.5]])
    )  # rounding again would make them 127 and 64
    for target in (make_like(coarse), KernelInt8Weight.of(make_like(coarse))):
        for source in (coarse, KernelInt8Weight.of(coarse)):
            target.copy_(source)
            assert target.codes.tolist() == [[2, 1]] and target.scale.item() == 0.5


def make_like(weight: Int8Weight) -> Int8Weight:
    return torch.empty_like(weight)


def test_all_or_none() -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 4)).to(DEVICE)
    quantize_(model, 8, select=lambda name: name == "0.weight", weight_only=True)
    quantize_(model, 8, group_size=8, select=lambda name: name == "1.weight")
    with pytest.raises(ValueError, match=r"1\.weight has group_size=8; the kernel takes"):
        use_int8_kernel_(model)
    assert by_kernel(model) == [False, False]
    dequantize_(model)
    quantize_(model, 4, group_size=8)
    assert use_int8_kernel_(model) == 0
