"""kernels/galore.py: the step of the reference on every side, in place, and in the optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from kernel_checks import (
    DEVICE,
    DTYPES,
    Guarded,
    check,
    check_operator,
    each_dtype_of_which_float16_is_slow,
    numbers,
    poisoned,
    strided,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lm_from_scratch.kernels.galore import (
    GaLore,
    galore_step,
    galore_step_,
    project_forward,
    update_,
)
from lm_from_scratch.optim.galore import GaLore as Reference
from lm_from_scratch.optim.galore import galore_step as reference
from lm_from_scratch.optim.galore_basis import PROJECTION_TYPES
from lm_from_scratch.optim.in_backward import update_in_backward

OPTIONS: dict[str, Any] = dict(lr=0.3, betas=(0.8, 0.999), eps=1e-3, weight_decay=0.1, scale=0.7)
SIDES = {"left": (True, False), "right": (False, True), "both": (True, True)}
each_side = pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES)


def arguments(m: int, n: int, rank: int, sides: tuple[bool, bool], size: float = 1.0) -> list[Any]:
    """Parameter, gradient, left, right, both moments."""
    left, right = (
        torch.linalg.qr(numbers(k, rank, seed=k, grad=False)).Q if has else None
        for k, has in zip((m, n), sides, strict=True)
    )
    low = (rank if sides[0] else m, rank if sides[1] else n)
    param, grad, exp_avg, exp_avg_sq = (
        numbers(*shape, seed=seed, grad=False, scale=scale)
        for seed, (shape, scale) in enumerate(
            [((m, n), 1.0), ((m, n), size), (low, size), (low, size)]
        )
    )
    return [param, grad, left, right, exp_avg, exp_avg_sq.square()]


def on_device(tensors: list[Any], dtype: torch.dtype = torch.float32) -> list[Any]:
    """Parameter and gradient in ``dtype``, the others in float32."""
    made = [x if x is None else x.to(DEVICE, torch.float32) for x in tensors]
    return [*(x.to(dtype) for x in made[:2]), *made[2:]]


def widened(function: Any) -> Any:
    """``function`` with bases and moments in float32 at least: ``check`` rounds them, too."""

    def call(param: Tensor, grad: Tensor, *rest: Any) -> Any:
        wide = [
            x.to(torch.promote_types(x.dtype, torch.float32)) if isinstance(x, Tensor) else x
            for x in rest
        ]
        return function(param, grad, *wide, **OPTIONS)

    return call


@each_dtype_of_which_float16_is_slow
@each_side
@pytest.mark.parametrize("shape", [(1, 1, 1), (37, 21, 5), (70, 83, 17)], ids=str)
def test_equals_the_reference(
    shape: tuple[int, int, int], sides: tuple[bool, bool], dtype: torch.dtype
) -> None:
    arguments_ = arguments(*shape, sides)
    check(widened(galore_step), widened(reference), *arguments_, 3, dtype=dtype, name="galore_step")


@each_side
def test_takes_any_strides(sides: tuple[bool, bool]) -> None:
    check(
        widened(galore_step), widened(reference), *arguments(37, 21, 5, sides), 3,
        dtype=torch.float32, name="galore_step", layout=strided,
    )  # fmt: skip


def test_the_first_step() -> None:
    """Where the moments are 0, an error of 1 - beta in float32 is the whole error."""
    *tensors, m, v = arguments(9, 11, 4, (False, True))
    check(
        widened(galore_step), widened(reference), *tensors, 0 * m, 0 * v, 1, dtype=torch.float32,
        name="galore_step",
    )  # fmt: skip


@pytest.mark.parametrize("step", [1, 100_000])
@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_gradients_of_any_size(size: float, step: int) -> None:
    """A direction has no unit. eps is nothing beside these gradients, or everything."""
    check(
        widened(galore_step), widened(reference), *arguments(9, 11, 4, (True, False), size), step,
        dtype=torch.float32, name=f"galore_step {size}",
    )  # fmt: skip


@each_dtype_of_which_float16_is_slow
@each_side
def test_in_place(sides: tuple[bool, bool], dtype: torch.dtype) -> None:
    """The parameter and the moments change, no other number does, and none around them."""
    tensors = on_device(arguments(37, 21, 5, sides), dtype)
    for layout in (lambda x: x, strided):
        want = galore_step(*tensors, 3, **OPTIONS)
        places = [
            x if x is None else Guarded(layout(x) if i < 4 else x) for i, x in enumerate(tensors)
        ]
        given = [x and x.tensor for x in places]
        versions = [x._version for x in given if x is not None]
        with poisoned():
            galore_step_(*given, 3, **OPTIONS)
        for i, new in zip((0, 4, 5), want, strict=True):
            torch.testing.assert_close(given[i], new, rtol=0, atol=0)
            assert not torch.equal(new, tensors[i])
            inside = Guarded(given[i])
            assert torch.equal(places[i].memory.isnan(), inside.before.isnan())
        for guard in [guard for guard in places[1:4] if guard is not None]:
            guard.assert_untouched()
        written = [a - b for a, b in zip((x._version for x in given if x is not None), versions)]
        assert [bool(count) for count in written] == [
            i in (0, 4, 5) for i, x in enumerate(given) if x is not None
        ]  # autograd is told


@pytest.mark.slow
def test_is_one_operator_for_each_half() -> None:
    for sides in SIDES.values():
        param, grad, left, right, m, v = on_device(arguments(9, 7, 3, sides))
        check_operator(project_forward, grad, left, right)
        low = project_forward(grad, left, right)
        numbers_ = 3.0, 0.1, [0.9, 0.999], 1e-8, 0.1, 0.5
        check_operator(update_, param, low, left, right, m, v, *numbers_)
        before = [x if x is None else x.clone() for x in (param, grad, left, right, m, v)]
        torch.compiler.reset()
        compiled = torch.compile(galore_step_, backend="aot_eager", fullgraph=True)
        for step in (1, 2):
            compiled(param, grad, left, right, m, v, step)
            galore_step_(*before, step)
        for a, b in zip((param, m, v), (before[0], *before[4:]), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(grad=torch.ones(9, 7).half()), "grad torch.float16 of shape (9, 7)"),
        (dict(grad=torch.ones(7, 9)), "grad torch.float32 of shape (7, 9); they must agree"),
        (dict(left=None), "left and right are None; without a basis, adamw is the step"),
        (dict(left=torch.ones(7, 3)), "left is torch.float32 of shape (7, 3); with a param of"),
        (dict(left=torch.ones(9)), "left is torch.float32 of shape (9,); with"),
        (dict(right=torch.ones(9, 3)), "must be float32 of shape (7, 3)"),
        (dict(left=torch.ones(9, 3).half()), "left is torch.float16 of shape (9, 3)"),
        (dict(exp_avg=torch.ones(3, 6)), "exp_avg is torch.float32 of shape (3, 6); with"),
        (dict(exp_avg_sq=torch.ones(3, 7).half()), "exp_avg_sq is torch.float16 of shape"),
        (dict(exp_avg_sq=torch.ones(7, 3).mT), "exp_avg_sq has strides (1, 3); call contiguous()"),
        (dict(param=torch.ones(9, 7).double()), "param is torch.float64; kernels"),
        (dict(exp_avg=torch.ones(3, 7, device="meta")), "exp_avg on meta; they must be on one"),
        (dict(grad=torch.ones(9, 7).requires_grad_()), "grad requires a gradient"),
        (
            dict(grad=torch.ones(9, 7).int()),
            "param is torch.float32 of shape (9, 7), grad torch.int32",
        ),
        (dict(param=torch.ones(9, 7).int(), grad=torch.ones(9, 7).int()), "param is torch.int32"),
        (
            dict(param=torch.ones(7, device=DEVICE).expand(9, 7)),
            "param of shape (9, 7) has strides (0, 1); a number",
        ),
        (dict(lr=torch.ones(2)), "lr has shape (2,); it must be one number"),
        (dict(betas=(0.9, torch.ones(2))), "beta2 has shape (2,); it must be one number"),
        (
            dict(param=torch.ones(9, 7, 1), grad=torch.ones(9, 7, 1)),
            "param has shape (9, 7, 1) and must be a matrix",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(change: dict[str, Any], words: str) -> None:
    names = "param", "grad", "left", "right", "exp_avg", "exp_avg_sq"
    given = dict(zip(names, on_device(arguments(9, 7, 3, (True, False))), strict=True)) | {
        name: x.to(DEVICE) if isinstance(x, Tensor) and not x.is_meta else x
        for name, x in change.items()
    }
    before = {name: x.detach().clone() for name, x in given.items() if isinstance(x, Tensor)}
    with pytest.raises(ValueError, match="galore_step: ") as error:
        galore_step_(**given, step=1)
    assert words in str(error.value)
    for name, x in before.items():
        assert x.is_meta or torch.equal(x, given[name])


# ------------------------------------------------------------------------------- the optimizer


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    """Tall, wide, square, of a convolution, and a bias, which is not projected."""
    shapes = [(11, 6), (6, 11), (7, 7), (5, 3, 2), (5,)]
    return [nn.Parameter(numbers(*shape, grad=False).to(DEVICE, dtype)) for shape in shapes]


def feed(optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for i, p in enumerate(optimizer.param_groups[0]["params"]):
            p.grad = numbers(*p.shape, seed=100 * step + i, grad=False).to(p)
        optimizer.step()


def assert_alike(
    ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, dtype: torch.dtype
) -> None:
    pairs = zip(*(o.param_groups[0]["params"] for o in (ours, theirs)), strict=True)
    for p, q in pairs:
        rounding = 4 * torch.finfo(dtype).eps * (dtype != torch.float32)  # of weights up to 4
        # In half precision, the reference rounds the state of what is not projected, and between
        # any two operations. All other state is float32.
        loose = 4 * rounding * (p.dim() == 1)
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5 + rounding + loose)
        assert ours.state[p].keys() == theirs.state[q].keys()
        for name, value in ours.state[p].items():
            other = theirs.state[q][name]
            assert value.dtype == other.dtype and value.shape == other.shape
            torch.testing.assert_close(value, other, rtol=0, atol=1e-5 + loose)


STEPS = [
    *((kind, torch.float32) for kind in PROJECTION_TYPES),
    *((kind, dtype) for kind in ("std", "full") for dtype in DTYPES[1:]),
]
QUICK = [("std", torch.float32)]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [pytest.param(*step, marks=[pytest.mark.slow] * (step not in QUICK)) for step in STEPS],
    ids=str,
)
def test_steps_of_the_optimizer(kind: str, dtype: torch.dtype) -> None:
    """5 steps with 3 bases; a checkpoint of either one loads into the other."""
    options: Any = dict(
        OPTIONS, lr=0.05, eps=0.03, rank=3, update_proj_gap=2, projection_type=kind, seed=2
    )
    ours, theirs = (kind_(weights(dtype), **options) for kind_ in (GaLore, Reference))
    before = [p.detach().clone() for p in ours.param_groups[0]["params"]]
    for optimizer in (ours, theirs):
        feed(optimizer, range(3))
    assert_alike(ours, theirs, dtype)
    swapped = []
    for saved, kind_ in ((ours, Reference), (theirs, GaLore)):
        params = [nn.Parameter(p.detach().clone()) for p in saved.param_groups[0]["params"]]
        loaded = kind_(params, lr=9.0)
        loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
        swapped.append(loaded)
    for optimizer in (ours, theirs, *swapped):
        feed(optimizer, range(3, 5))
    for a, b in ((ours, theirs), (ours, swapped[0]), (swapped[1], theirs)):
        assert_alike(a, b, dtype)
    for p, old in zip(ours.param_groups[0]["params"], before, strict=True):
        assert not torch.equal(p, old)
        assert p.dim() == 1 or ours.state[p]["bases"] == 3


@pytest.mark.slow
def test_other_options_of_the_optimizer() -> None:
    for options in (
        dict(max_drift=0.1, basis="subspace"),
        dict(moments="rotate", basis="svd"),
        dict(moments="reset", lr=torch.tensor(0.03)),
        dict(update_proj_gap=None, rank=99),
        dict(rank=None),
    ):
        both: Any = dict(rank=3, update_proj_gap=2, lr=0.05, eps=0.03, scale=0.7) | options
        ours, theirs = (kind(weights(torch.float32), **both) for kind in (GaLore, Reference))
        for optimizer in (ours, theirs):
            feed(optimizer, range(5))
        assert_alike(ours, theirs, torch.float32)


def test_the_largest_gradient_makes_no_step_that_is_not_finite() -> None:
    p = nn.Parameter(torch.zeros(8, 6, device=DEVICE))
    optimizer = GaLore([p], rank=4)
    for _ in range(2):
        p.grad = torch.full_like(p, 3e38)
        with poisoned():
            optimizer.step()
        assert p.isfinite().all()


def test_inside_the_backward_pass() -> None:
    results = []
    for kind in (GaLore, Reference):
        torch.manual_seed(0)
        layer = nn.Linear(11, 6, device=DEVICE)
        optimizer = kind(layer.parameters(), lr=0.05, rank=3, update_proj_gap=2, eps=0.03)
        with update_in_backward(optimizer, grad_accumulation=2):
            for step in range(6):
                layer(
                    numbers(4, 11, seed=step, grad=False).to(layer.weight)
                ).square().sum().backward()
                assert layer.weight.grad is None
        results.append(layer.weight.detach())
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


class Allocations(TorchDispatchMode):
    """What operators return that is as large as the weight, and is no view."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found = size, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for x in result if isinstance(result, (tuple, list)) else [result]:
            new = isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known
            if new and x.numel() >= self.size:
                self.found.append(str(func))
        return result


@each_dtype_of_which_float16_is_slow
def test_nothing_of_the_size_of_the_weight_is_made(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for operator in (project_forward, update_):  # the mode does not see inside an operator
        plain = operator._init_fn
        monkeypatch.setattr(f"lm_from_scratch.kernels.galore.{plain.__name__}", plain)
    found = []
    for kind in (GaLore, Reference):
        p = nn.Parameter(numbers(40, 30, grad=False).to(DEVICE, dtype))
        optimizer = kind([p], rank=2)
        p.grad = torch.ones_like(p)
        optimizer.step()  # which makes the basis
        with Allocations(p.numel()) as made:
            optimizer.step()
        found.append(made.found)
    assert not found[0], found
    assert found[1] or dtype == torch.float32


@pytest.mark.parametrize(
    ("param", "options", "words"),
    [
        (torch.ones(3, 2), dict(fused=True), "fused=True: the kernel cannot do that"),
        (torch.ones(3, 2).double(), {}, "torch.float64: the kernel takes"),
        (
            torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last),
            {},
            "shape (4, 3, 2, 2) has strides (12, 1, 6, 3)",
        ),
        (
            torch.ones(2, device=DEVICE).expand(3, 2),
            {},
            "GaLore: parameter of shape (3, 2) has strides (0, 1)",
        ),
    ],
)
def test_the_optimizer_refuses(param: Tensor, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        GaLore([nn.Parameter(param.to(DEVICE))], rank=2, **options)
    assert words in str(error.value)


def test_the_optimizer_refuses_a_parameter_that_is_elsewhere() -> None:
    p = nn.Parameter(torch.ones(3, 2, device="cpu" if DEVICE == "cuda" else "meta"))
    optimizer = GaLore([p], rank=2, update_proj_gap=None)
    with pytest.raises(ValueError, match="galore_step: param is on"):
        optimizer.coordinates(p, optimizer.new_state(p, optimizer.param_groups[0]))
