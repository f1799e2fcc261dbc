"""Mistakes with swapped and quantised weights: what torch does, and what happens here instead."""

import copy
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_gpt2, token_ids
from torch import Tensor, nn

from lm_from_scratch.checkpoint.names import rename
from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.instruments.references import PATHS, Tied, observe, share
from lm_from_scratch.weights.int4 import Int4Weight
from lm_from_scratch.weights.int8 import Int8Weight
from lm_from_scratch.weights.quantize import quantize_
from lm_from_scratch.weights.quantized_weight import QuantizedWeight
from lm_from_scratch.weights.swap import swap_on_conversion, swap_parameters_

aten = torch.ops.aten
flag = torch.__future__.get_swap_module_params_on_conversion
set_flag = torch.__future__.set_swap_module_params_on_conversion
each_kind = pytest.mark.parametrize("kind", [Int8Weight, Int4Weight])


@pytest.fixture(autouse=True)
def flag_stays_off() -> Iterator[None]:
    yield
    left = flag()
    set_flag(False)
    assert not left


def matrix(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(6, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(32, 6, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def loss(module: Tied) -> Tensor:
    return F.linear(torch.ones(1, 4), module.weight).sum()


def test_an_optimizer_sees_what_happens_in_place_but_no_assignment() -> None:
    module = Tied()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    with torch.no_grad():
        module.weight.mul_(2)  # said to be invisible
    assert optimizer.param_groups[0]["params"][0] is module.weight
    loss(module).backward()
    before = module.weight.detach().clone()
    optimizer.step()
    assert torch.equal(module.weight, before - 1)

    module.embed.weight = module.head.weight = nn.Parameter(module.weight.detach() * 2)
    optimizer.zero_grad()
    loss(module).backward()
    before = module.weight.detach().clone()
    optimizer.step()  # no error
    assert torch.equal(module.weight, before)
    assert optimizer.param_groups[0]["params"][0].grad is None


def test_swapped_parameters_are_seen() -> None:
    module = Tied()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    swap_parameters_(module, {"embed.weight": torch.zeros(5, 4, requires_grad=True)})
    loss(module).backward()
    optimizer.step()
    assert torch.equal(module.head.weight, torch.full((5, 4), -1.0))


def test_the_flag_swaps_instead_of_setting_data() -> None:
    """What a parameter carries tells the two apart. Its id and its dtype do not."""
    for enabled in (False, True):
        module = Tied()
        weight: Any = module.weight
        weight.tag = "mine"
        old = weight.detach()
        with swap_on_conversion(enabled):
            module.bfloat16()
        assert module.weight is weight and weight.dtype == torch.bfloat16
        assert not share(weight, old)
        assert hasattr(weight, "tag") is not enabled
    assert observe(*PATHS["to"]).view == "left"
    assert observe(*PATHS["to, swap flag"]).view == "RuntimeError"


HOLDERS: dict[str, Callable[[nn.Linear], object]] = {
    "weak reference": lambda module: weakref.ref(module.weight),
    "view": lambda module: module.weight.view(-1),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS.keys())
def test_a_flag_left_on_refuses_what_worked(hold: Callable[[nn.Linear], object]) -> None:
    module = nn.Linear(2, 2, bias=False)
    held = hold(module)
    with pytest.raises(KeyError), swap_on_conversion():
        raise KeyError
    module.bfloat16()  # the flag is off again
    set_flag(True)
    with pytest.raises(RuntimeError, match=r"Couldn't swap Linear\.weight"):
        module.float()
    set_flag(False)
    assert held is not None and module.weight.dtype == torch.bfloat16


def test_a_flag_left_on_poisons_a_graph() -> None:
    module = nn.Linear(2, 2, bias=False)
    y = module(torch.ones(1, 2))
    with swap_on_conversion():
        module.bfloat16()
    with pytest.raises(RuntimeError, match="poisoned by swap_tensors"):
        y.sum().backward()


@each_kind
@pytest.mark.parametrize("swapped", [False, True])
def test_loading_without_assign_takes_values_only(
    kind: type[QuantizedWeight], swapped: bool
) -> None:
    layer = linear(kind.quantize(matrix(dtype=torch.bfloat16)))
    weight: Any = layer.weight
    checkpoint = {"weight": matrix(1)}
    with swap_on_conversion(swapped):
        layer.load_state_dict(checkpoint)
    assert layer.weight is weight and type(weight) is kind and weight.dtype == torch.bfloat16
    want = kind.quantize(matrix(1).bfloat16()).dequantize()
    assert torch.equal(weight.dequantize(), want)
    checkpoint["weight"].zero_()
    assert torch.equal(weight.dequantize(), want)


@each_kind
def test_loading_with_assign_takes_the_dtype_of_the_checkpoint(kind: type[QuantizedWeight]) -> None:
    layer = linear(kind.quantize(matrix(dtype=torch.bfloat16)))
    with swap_on_conversion():
        layer.load_state_dict({"weight": matrix(1)}, assign=True)
    assert type(layer.weight) is kind and layer.weight.dtype == torch.float32
    assert torch.equal(layer.weight.dequantize(), kind.quantize(matrix(1)).dequantize())


@each_kind
@pytest.mark.parametrize("assign", [False, True])
def test_all_combinations_of_classes_load(kind: type[QuantizedWeight], assign: bool) -> None:
    plain, quantized = matrix(), kind.quantize(matrix())
    new = kind.quantize(matrix(1))
    contents: list[tuple[Tensor, Tensor, Tensor]] = [
        (quantized, matrix(1), new.dequantize()),  # plain into quantised
        (quantized, nn.Parameter(matrix(1)), new.dequantize()),
        (plain, new, new.dequantize()),  # quantised into plain
        (quantized, new, new.dequantize()),
        (quantized, nn.Parameter(new, requires_grad=False), new.dequantize()),
    ]
    for target, source, want in contents:
        layer = linear(target.clone())
        weight = layer.weight
        with swap_on_conversion():
            layer.load_state_dict({"weight": source}, assign=assign)
        got = layer.weight
        assert got is weight
        assert isinstance(got, kind) is (isinstance(target, kind) or (assign and source is new))
        got = got.dequantize() if isinstance(got, QuantizedWeight) else got
        torch.testing.assert_close(got.detach(), want)


@each_kind
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_module_loads_its_own_state(
    kind: type[QuantizedWeight], assign: bool, swapped: bool
) -> None:
    layer = linear(kind.quantize(matrix()))
    want = layer.weight.dequantize()
    with swap_on_conversion(swapped):
        layer.load_state_dict(layer.state_dict(), assign=assign)
    assert isinstance(layer.weight, kind) and torch.equal(layer.weight.dequantize(), want)


def test_what_is_traceable_is_swapped_without_the_flag() -> None:
    assert not observe(*PATHS["to, subclass"]).new_dtype  # the payload stays as it was
    assert observe(*PATHS["to, traceable subclass"]).new_dtype
    assert observe(*PATHS["to, traceable subclass"]) == observe(*PATHS["to, swap flag"])


@each_kind
def test_a_quantised_weight_is_converted_whole(kind: type[QuantizedWeight]) -> None:
    layer = linear(kind.quantize(matrix()))
    weight: Any = layer.weight
    layer.bfloat16()
    assert id(layer.weight) == id(weight) and weight.dtype == torch.bfloat16
    dtypes = {name: part.dtype for name, part in kind.parts(weight).items()}
    assert dtypes.pop("codes") in (torch.int8, torch.uint8)
    assert set(dtypes.values()) == {torch.bfloat16}
    reference = weakref.ref(weight)
    with pytest.raises(RuntimeError, match="Couldn't swap"):  # like every swap
        layer.float()
    assert reference() is not None and layer.weight.dtype == torch.bfloat16


def test_assign_unties_and_strands_unless_it_swaps() -> None:
    off, on = observe(*PATHS["load, assign"]), observe(*PATHS["load, assign, swap flag"])
    assert (off.tie, off.optimizer) == (False, False)
    assert (on.tie, on.optimizer) == (True, True)
    assert off.checkpoint and on.checkpoint  # both alias the checkpoint


def pollutes() -> bool:
    """Whether this torch has pytorch#188166."""
    state = nn.Linear(2, 2).state_dict()
    nn.Linear(2, 2).load_state_dict(state, assign=True)
    return "assign_to_params_buffers" in state._metadata[""]  # type: ignore[attr-defined]


def test_assign_of_torch_pollutes_the_state() -> None:
    """The default load that follows aliases the checkpoint, and takes its dtype.

    A version of torch without the bug is one of two; a plain dictionary is safe in both.
    """
    state = nn.Linear(2, 2).state_dict()
    nn.Linear(2, 2).load_state_dict(state, assign=True)
    a, b = nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64)
    for module in (a, b):
        module.load_state_dict(state)
    assert share(a.weight, b.weight) is pollutes()
    assert (b.weight.dtype == torch.float32) is pollutes()

    state = nn.Linear(2, 2).state_dict()
    nn.Linear(2, 2).load_state_dict(dict(state), assign=True)
    assert state._metadata == nn.Linear(2, 2).state_dict()._metadata  # type: ignore[attr-defined]
    a.load_state_dict(state)
    assert not share(a.weight, state["weight"])


def test_our_loader_does_not_pollute(tmp_path: Path) -> None:
    """It hands torch a dictionary of its own, which has no metadata to write into."""
    model = tiny_gpt2()
    state = model.state_dict()
    metadata = copy.deepcopy(state._metadata)  # type: ignore[attr-defined]
    renamed = rename(state, model)
    assert type(renamed) is dict and not hasattr(renamed, "_metadata")

    save_pretrained(model, tmp_path / "model")
    first, second = (from_pretrained(tmp_path / "model") for _ in range(2))
    assert state._metadata == metadata  # type: ignore[attr-defined]
    third = tiny_gpt2(seed=1).double()
    third.load_state_dict(first.state_dict())
    for ours in (second, third, model):
        pairs = zip(first.parameters(), ours.parameters(), strict=True)
        assert not any(share(a, b) for a, b in pairs)
    assert {p.dtype for p in third.parameters()} == {torch.float64}


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_the_loader_leaves_what_it_was_given(
    bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a checkpoint that brings metadata along comes out as it went in."""
    from lm_from_scratch.checkpoint import weights

    model = tiny_gpt2(n_embd=32)
    if bits is not None:
        quantize_(model, bits)
    save_pretrained(model, tmp_path / "model")
    read = weights.read_tensors(tmp_path / "model")
    given = nn.Module().state_dict()  # an OrderedDict with _metadata
    given.update(read)
    given._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    monkeypatch.setattr(weights, "read_tensors", lambda folder: given)
    loaded = from_pretrained(tmp_path / "model")
    assert given._metadata == {"": {"version": 1}}  # type: ignore[attr-defined]
    assert list(given) == list(read)
    idx = token_ids(2, 5)
    with torch.no_grad():
        torch.testing.assert_close(loaded(idx), model(idx))
