"""Swapping all or none, torch's flag restored, and the truth table of a parameter's holders."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lm_from_scratch.instruments import references
from lm_from_scratch.instruments.references import (
    PATHS,
    Observed,
    Subclass,
    Tied,
    Traceable,
    observe,
)
from lm_from_scratch.weights.int8 import Int8Weight
from lm_from_scratch.weights.swap import is_held, swap_, swap_on_conversion, swap_parameters_

flag = torch.__future__.get_swap_module_params_on_conversion
set_flag = torch.__future__.set_swap_module_params_on_conversion
overwrites = torch.__future__.get_overwrite_module_params_on_conversion


@pytest.fixture(autouse=True)
def flags_stay_off() -> Iterator[None]:
    yield
    left = flag(), overwrites()
    set_flag(False)
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert left == (False, False)


def parameters(*values: float) -> list[Any]:
    return [nn.Parameter(torch.full((2, 3), float(value))) for value in values]


def model() -> Any:
    """Three linear maps; the last shares its weight with the first."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    layers[2].weight = layers[0].weight
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    return layers


#: What holds a tensor so that torch will not swap it.
HOLDERS: dict[str, Callable[[Tensor], object]] = {
    "view": lambda tensor: tensor.view(-1),
    "slice": lambda tensor: tensor[:1],
    "view without gradient": torch.no_grad()(lambda tensor: tensor.view(-1)),
    "weak reference": weakref.ref,
    "graph that saved it": lambda tensor: tensor * torch.ones((), requires_grad=True),
    "graph of two losses": lambda tensor: (tensor.sum(), tensor.view(-1)),
}
each_holder = pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS.keys())


# ------------------------------------------------------------------------------------ the flag


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_the_flag_is_set_inside_and_restored_after(before: bool, enabled: bool) -> None:
    set_flag(before)
    with swap_on_conversion(enabled):
        assert flag() is enabled
    assert flag() is before
    with pytest.raises(KeyError), swap_on_conversion(enabled):
        raise KeyError
    assert flag() is before
    set_flag(False)


def test_flags_nest() -> None:
    with swap_on_conversion():
        with swap_on_conversion(False):
            assert not flag()
            with pytest.raises(KeyError), swap_on_conversion():
                raise KeyError
            assert not flag()
        assert flag()
    assert not flag()


def test_a_refused_conversion_restores_the_flag() -> None:
    module = nn.Linear(2, 2)
    held = module.weight.view(-1)
    with pytest.raises(RuntimeError, match="Couldn't swap"), swap_on_conversion():
        module.bfloat16()
    assert not flag()
    assert held.dtype == module.weight.dtype == torch.float32


def test_the_overwrite_flag_is_restored() -> None:
    with pytest.raises(KeyError), references.overwrite_on_conversion():
        assert overwrites()
        with references.overwrite_on_conversion():
            pass
        assert overwrites()
        raise KeyError
    assert not overwrites()


# ----------------------------------------------------------------------------- several tensors


def test_swap_moves_class_attributes_and_numbers() -> None:
    a, b, new_a, new_b = parameters(1, 2, 3, 4)
    new_b = nn.Parameter(Int8Weight.quantize(new_b.detach()), requires_grad=False)
    a.tag = "a"
    objects = id(a), id(b)
    swap_([("a", a, new_a), ("b", b, new_b)])
    assert (id(a), id(b)) == objects
    assert a[0, 0] == 3 and new_a[0, 0] == 1
    assert isinstance(b, Int8Weight) and not isinstance(new_b, Int8Weight)
    assert not b.requires_grad and new_b.requires_grad
    assert not hasattr(a, "tag") and new_a.tag == "a"
    torch.testing.assert_close(b.dequantize(), torch.full((2, 3), 4.0))


def test_no_pairs() -> None:
    swap_([])
    swap_parameters_(nn.Linear(2, 2), {})


@each_holder
@pytest.mark.parametrize("which", range(4))
def test_swap_all_or_none(hold: Callable[[Tensor], object], which: int) -> None:
    """Whichever of the four tensors is held, and however."""
    tensors = parameters(1, 2, 3, 4)
    a, b, new_a, new_b = tensors
    losses = [tensor.sum() for tensor in tensors if tensor is not tensors[which]]
    held = hold(tensors[which])
    name = "ab"[which % 2]
    with pytest.raises(ValueError, match=rf"^{name} cannot be swapped .*Nothing was changed$"):
        swap_(pair for pair in [("a", a, new_a), ("b", b, new_b)])
    assert [int(tensor[0, 0]) for tensor in tensors] == [1, 2, 3, 4]
    for loss in losses:
        loss.backward()  # torch poisoned none of the graphs
    del held, losses, loss
    swap_([("a", a, new_a), ("b", b, new_b)])
    assert [int(tensor[0, 0]) for tensor in tensors] == [3, 4, 1, 2]


def test_what_only_torch_refuses_is_swapped_back() -> None:
    """Slots are compared by torch alone. The first pair had been swapped by then."""

    class Slotted(Tensor):
        __slots__ = ("extra",)

    a, b, new_a, _ = parameters(1, 2, 3, 4)
    other = torch.full((2, 3), 4.0).as_subclass(Slotted)
    with pytest.raises(ValueError, match=r"^b cannot be swapped: .*slots.*Nothing was changed$"):
        swap_([("a", a, new_a), ("b", b, other)])
    assert (a[0, 0], b[0, 0], new_a[0, 0]) == (1, 2, 3)
    assert type(other) is Slotted and type(b) is nn.Parameter


@each_holder
def test_is_held_says_what_torch_will_do(hold: Callable[[Tensor], object]) -> None:
    (a,) = parameters(1)
    assert not is_held(a)
    held = hold(a)
    assert is_held(a)
    with pytest.raises(RuntimeError):
        torch.utils.swap_tensors(a, *parameters(2))
    del held
    assert not is_held(a)


def test_is_held_lets_pass_what_torch_lets_pass() -> None:
    """A detached window, a list, a gradient, and a graph that ends in the tensor."""
    (a,) = parameters(1)
    held: Any = a.detach(), [a]
    (a * 2).sum().backward()
    loss = a.sum()
    assert not is_held(a)
    torch.utils.swap_tensors(a, *parameters(2))
    assert a is held[1][0]
    with pytest.raises(RuntimeError, match="poisoned by swap_tensors"):
        loss.backward()


def test_after_backward_an_old_loss_does_no_harm() -> None:
    (a,) = parameters(1)
    loss = (a * 2).sum()
    loss.backward()
    swap_([("a", a, *parameters(3))])
    (a * 5).sum().backward()
    assert (loss, a.grad[0, 0]) == (12, 5)


# ------------------------------------------------------------------------------ a built model


def test_swap_parameters_reaches_the_optimizer_and_the_tie() -> None:
    layers = model()
    optimizer = torch.optim.SGD(layers.parameters(), lr=1.0)
    before = [id(parameter) for parameter in layers.parameters()]
    swap_parameters_(layers, {"0.weight": torch.zeros(4, 4).requires_grad_()})
    assert [id(parameter) for parameter in layers.parameters()] == before
    assert layers[0].weight is layers[2].weight and type(layers[0].weight) is nn.Parameter
    assert layers[0].weight.grad is None and layers[1].weight.grad is not None
    layers(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert layers[2].weight.abs().max() > 0


@pytest.mark.parametrize("wanted", [False, True])
def test_the_new_contents_say_whether_they_want_a_gradient(wanted: bool) -> None:
    layers = model()
    swap_parameters_(layers, {"1.weight": torch.zeros(4, 4, requires_grad=wanted)})
    assert layers[1].weight.requires_grad is wanted


@each_holder
def test_refused_parameters_keep_numbers_and_gradients(hold: Callable[[Tensor], object]) -> None:
    layers = model()
    before = [(p, p.grad, p.detach().clone()) for p in layers.parameters()]
    held = hold(layers[1].weight)
    new = {"0.weight": torch.zeros(4, 4), "1.weight": torch.zeros(4, 4)}
    with pytest.raises(ValueError, match=r"^1\.weight cannot be swapped"):
        swap_parameters_(layers, new)
    for parameter, (old, grad, numbers) in zip(layers.parameters(), before, strict=True):
        assert parameter is old and parameter.grad is grad
        assert torch.equal(parameter, numbers)
    del held
    swap_parameters_(layers, new)
    assert layers[1].weight.abs().max() == 0


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"0.weight": torch.zeros(4, 4), "5.weight": torch.zeros(4, 4)}, "no parameter '5.weight'"),
        (
            {"0.weight": torch.zeros(4, 4), "1.weight": torch.zeros(4, 5)},
            r"1\.weight has shape \(4, 4\), its new contents \(4, 5\)",
        ),
    ],
    ids=["name", "shape"],
)
def test_a_bad_name_or_shape_changes_nothing(new: dict[str, Tensor], message: str) -> None:
    layers = model()
    before = {name: p.detach().clone() for name, p in layers.named_parameters()}
    with pytest.raises(ValueError, match=message):
        swap_parameters_(layers, new)
    for name, parameter in layers.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is not None


# ----------------------------------------------------------------------------- the truth table

#: Recorded with torch 2.11.0, and the same with 2.13.0: name, then the fields of `Observed`. "!" is
#: a RuntimeError of the conversion, "!!" one of the backward pass.
RECORDED = """
                          object optimizer tie   storage dtype checkpoint view    weak    graph   leaf
weight.mul_(2)          : yes    yes       yes   yes     no    no         follows follows !!      arrives
weight = Parameter(...) : no     no        no    no      yes   no         left    left    lost    lost
swap_tensors            : yes    yes       yes   no      yes   no         !       !       !       !!
to                      : yes    yes       yes   no      yes   no         left    follows arrives arrives
to, overwrite flag      : no     no        no    no      yes   no         left    left    lost    lost
to, swap flag           : yes    yes       yes   no      yes   no         !       !       !       !!
to, subclass            : yes    yes       yes   yes     no    no         follows follows arrives arrives
to, subclass, swap flag : yes    yes       yes   no      yes   no         !       !       !       !!
to, traceable subclass  : yes    yes       yes   no      yes   no         !       !       !       !!
load                    : yes    yes       yes   yes     no    no         follows follows !!      arrives
load, swap flag         : yes    yes       yes   yes     no    no         !       !       !       !!
load, assign            : no     no        no    no      yes   yes        left    left    lost    lost
load, assign, swap flag : yes    yes       yes   no      yes   yes        !       !       !       !!
"""  # noqa: E501


def recorded() -> dict[str, Observed]:
    short: dict[str, Any] = {"yes": True, "no": False}
    short |= {"!": "RuntimeError", "!!": "RuntimeError in backward"}
    rows = [line.split(":") for line in RECORDED.strip().splitlines()[1:]]
    return {
        name.strip(): Observed(*(short.get(word, word) for word in words.split()))
        for name, words in rows
    }


def test_the_truth_table_is_the_recorded_one() -> None:
    assert list(recorded()) == list(PATHS)
    assert references.truth_table() == recorded()


# -------------------------------------------------- the instrument, on conversions we know all of


UNCHANGED = Observed(
    same_object=True, optimizer=True, tie=True, old_storage=True, new_dtype=False, checkpoint=False,
    view="follows", weak="follows", graph="arrives", leaf="arrives",
)  # fmt: skip


@pytest.mark.parametrize("wrap", [torch.clone, Subclass, Traceable])
def test_nothing_done_is_seen_as_nothing(wrap: Callable[[Tensor], Tensor]) -> None:
    assert observe(lambda module: None, wrap) == UNCHANGED


def changed(**found: Any) -> Observed:
    return replace(UNCHANGED, **found)


def test_each_loss_is_seen_by_itself() -> None:
    def new_parameter_in_both(module: Tied) -> None:
        module.embed.weight = module.head.weight = nn.Parameter(module.weight.detach())

    def untie(module: Tied) -> None:
        module.head.weight = nn.Parameter(module.weight.detach())

    def other_storage(module: Tied) -> None:
        module.weight.data = module.weight.detach().clone()

    def checkpoint(module: Tied) -> None:
        module.weight.data = module.checkpoint["head.weight"].float().detach()
        module.checkpoint["head.weight"] = module.weight.detach()

    gone: dict[str, Any] = dict(
        same_object=False, optimizer=False, weak="left", graph="lost", leaf="lost"
    )
    assert observe(new_parameter_in_both) == changed(**gone)
    assert observe(untie) == changed(tie=False)
    assert observe(other_storage) == changed(old_storage=False, view="left")
    assert observe(checkpoint) == changed(old_storage=False, view="left", checkpoint=True)


def test_a_refused_conversion_raises_if_nobody_held_anything() -> None:
    def refuse(module: Tied) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        observe(refuse)


@pytest.mark.parametrize("wrap", [Subclass, Traceable])
def test_the_subclass_computes_like_its_payload(wrap: type[Subclass]) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    wrapped = wrap(x)
    result: Any = wrapped @ wrapped + 1
    assert type(result) is wrap
    assert torch.equal(result.payload, x @ x + 1)
    assert wrapped.mul_(3) is wrapped
    assert torch.equal(wrapped.payload, torch.tensor([[3.0, 6.0], [9.0, 12.0]]))
