"""kernels/adamw.py: the step of the reference, in place, and an optimizer that exchanges states."""

from typing import Any

import pytest
import torch
from kernel_checks import (
    DEVICE,
    DTYPES,
    MARGIN,
    Guarded,
    check,
    check_operator,
    each_dtype,
    numbers,
    strided,
)
from torch import Tensor, nn

from lm_from_scratch.kernels.adamw import AdamW, adamw, adamw_, adamw_in_place
from lm_from_scratch.optim.adamw import AdamW as PlainAdamW
from lm_from_scratch.optim.adamw import adamw as reference
from lm_from_scratch.optim.in_backward import update_in_backward

# 0.3: with the usual 1e-3 an error in the direction would be lost in the rounding of the parameter
OPTIONS: dict[str, Any] = dict(lr=0.3, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1)


def tensors(*shape: int) -> list[Tensor]:
    """A parameter, its gradient and its moments, in float64."""
    param, grad, m, v = (numbers(*shape, seed=s, grad=False) for s in range(4))
    return [param, grad, m, v.square()]


def on_device(number: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(number, dtype=dtype, device=DEVICE)


@each_dtype
@pytest.mark.parametrize("step", [1, 2, 1000])
@pytest.mark.parametrize("shape", [(), (5, 37), (3, 700)], ids=str)
def test_equals_the_reference(shape: tuple[int, ...], step: int, dtype: torch.dtype) -> None:
    check(
        lambda *args: adamw(*args, step, **OPTIONS),
        lambda *args: reference(*args, step, **OPTIONS),
        *tensors(*shape),
        dtype=dtype,
        name="adamw",
    )


@each_dtype
def test_takes_any_strides(dtype: torch.dtype) -> None:
    check(
        lambda *args: adamw(*args, 3, **OPTIONS),
        lambda *args: reference(*args, 3, **OPTIONS),
        *tensors(5, 37),
        dtype=dtype,
        name="adamw",
        layout=strided,
    )


def test_the_usual_options() -> None:
    """0.999 and 1e-8, from moments of zero: 1 - 0.999 in float32 would be wrong in digit five."""
    param, grad, zeros, _ = (x.float().to(DEVICE) for x in tensors(5, 37))
    zeros = torch.zeros_like(zeros)
    _, m, v = adamw(param, grad, zeros, zeros, 1)
    torch.testing.assert_close(m.double(), 0.1 * grad.double(), rtol=5e-7, atol=0.0)
    torch.testing.assert_close(v.double(), 0.001 * grad.double() ** 2, rtol=8e-7, atol=0.0)
    first = adamw(zeros, grad, zeros, zeros, 1, lr=1.0)[0].double()
    size = grad.double().abs()
    torch.testing.assert_close(first.abs(), size / (size + 1e-8), rtol=2e-6, atol=0.0)


def test_gradients_of_all_sizes() -> None:
    """From 1e-30, whose square is 0, to 1e15; a gradient of 0 divides 0 by epsilon."""
    grad = 10.0 ** torch.arange(-30.0, 16.0, 5.0, dtype=torch.float64)
    grad = torch.cat([grad, -grad, torch.zeros(1)])
    for step in (1, 1000):
        check(
            lambda *args, step=step: adamw(*args, step, **OPTIONS),
            lambda *args, step=step: reference(*args, step, **OPTIONS),
            numbers(21, grad=False), grad, 0.1 * grad, 1e-3 * grad * grad,
            dtype=torch.float32,
            name="adamw of all sizes",
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_moments_in_float32(dtype: torch.dtype) -> None:
    """They are not rounded, and the parameter is once."""
    wide = [x.float().to(DEVICE) for x in tensors(5, 37)]
    mixed = [x.to(dtype) for x in wide[:2]] + wide[2:]
    param, m, v = adamw(*mixed, 3, **OPTIONS)
    expected = adamw(*(x.float() for x in mixed), 3, **OPTIONS)
    assert param.dtype == dtype and torch.equal(param, expected[0].to(dtype))
    assert torch.equal(m, expected[1]) and torch.equal(v, expected[2])


def test_numbers_on_the_device() -> None:
    """A step and a learning rate that the host never reads, of shape () or (1,)."""
    args = [x.float().to(DEVICE) for x in tensors(5, 37)]
    options = {**OPTIONS, "lr": 0.25}  # the same number in every dtype
    expected = adamw(*args, 3, **options)
    for step, lr in (
        (on_device(3.0), on_device(0.25)),
        (on_device(3.0)[None], 0.25),
        (3, on_device(0.25, torch.float64)[None]),
        (torch.tensor(3.0), 0.25),  # on the CPU
    ):
        for ours, want in zip(adamw(*args, step, **{**options, "lr": lr}), expected, strict=True):
            assert torch.equal(ours, want)


@each_dtype
@pytest.mark.parametrize("layout", ["plain", "transposed", "with gaps"])
def test_in_place(layout: str, dtype: torch.dtype) -> None:
    """What :func:`adamw` returns, where the old values were; nothing else is written."""
    given = [x.to(DEVICE, dtype) for x in tensors(5, 37)]
    if layout == "transposed":
        given = [strided(x) for x in given]
    if layout == "with gaps":
        given = [torch.stack([x, x], -1)[..., 0] for x in given]
    expected = adamw(*given, 3, **OPTIONS)
    guards = [Guarded(x) for x in given]
    for guard in guards:  # not NaN: what is computed from NaN and stored by mistake is NaN, too
        guard.memory[:MARGIN] = guard.memory[-MARGIN:] = 7
        guard.before = guard.memory.clone()
    changed = [guards[i].tensor for i in (0, 2, 3)]
    versions = [x._version for x in changed]
    adamw_(*(guard.tensor for guard in guards), 3, **OPTIONS)
    guards[1].assert_untouched()
    for ours, want, version in zip(changed, expected, versions, strict=True):
        assert torch.equal(ours, want) and ours._version > version
    for guard in guards:
        assert (guard.memory[:MARGIN] == 7).all() and (guard.memory[-MARGIN:] == 7).all()
        if layout == "with gaps":
            assert guard.memory[MARGIN + 1 : -MARGIN : 2].isnan().all()


def test_nothing_to_do() -> None:
    empty = torch.empty(0, 5, device=DEVICE)
    assert [x.shape for x in adamw(empty, empty, empty, empty, 1)] == [(0, 5)] * 3


def test_is_one_operator() -> None:
    args = [x.float().to(DEVICE) for x in tensors(5, 37)]
    fixed = [0.9, 0.1, 0.999, 0.001, 1e-8]
    check_operator(adamw_in_place, *args, [*fixed, 0.99, 0.1, 0.1, 0.001], None)
    check_operator(
        adamw_in_place, *args, [*fixed, 0.0, 0.0, 1.0, 1.0], torch.rand(4, device=DEVICE)
    )
    check_operator(adamw_in_place, *(strided(x) for x in args), [*fixed, 0.9, 0.1, 0.1, 1.0], None)


def test_compiled_once_for_every_step() -> None:
    """With a step and a learning rate as tensors; and without a look at them, or it would not be
    one graph."""
    torch.compiler.reset()
    compiled = torch.compile(adamw_, backend="aot_eager", fullgraph=True)
    ours, theirs = ([x.float().to(DEVICE) for x in tensors(5, 37)] for _ in range(2))
    for t in range(1, 4):
        with torch.compiler.set_stance("fail_on_recompile" if t > 1 else "default"):
            compiled(*ours, on_device(float(t)), on_device(0.1 / t))
        adamw_(*theirs, on_device(float(t)), on_device(0.1 / t))
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


GRAD = torch.ones(2, 3, requires_grad=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(grad=torch.ones(3, 2)), "grad is torch.float32 of shape (3, 2)"),
        (dict(exp_avg=torch.ones(2, 3).double()), "exp_avg is torch.float64; kernels"),
        (dict(exp_avg_sq=torch.ones(2, 3).cfloat()), "exp_avg_sq is torch.complex64"),
        (dict(param=torch.ones(2, 3).long()), "param is torch.int64"),
        (dict(grad=torch.ones(2, 3, device="meta")), "grad on meta; they must be on one"),
        (dict(betas=(torch.tensor(0.9), 0.999)), "numbers; lm_from_scratch.optim.adamw.adamw can"),
        (dict(lr=torch.ones(2)), "lr has shape (2,); it must be one number"),
        (dict(lr=torch.ones(0)), "lr has shape (0,)"),
        (dict(step=torch.ones(1, 2)), "step has shape (1, 2); it must be one number"),
        (dict(grad=GRAD), "grad requires a gradient, and the kernel's step has none"),
        (dict(lr=GRAD.sum()), "lr requires a gradient"),
    ],
)
def test_refuses(changes: dict[str, Any], words: str) -> None:
    given = dict.fromkeys(("param", "grad", "exp_avg", "exp_avg_sq"), torch.ones(2, 3))
    given = {
        name: x.to(DEVICE) if isinstance(x, Tensor) and not x.is_meta else x
        for name, x in {**given, "step": 1, **changes}.items()
    }
    for step in (adamw, adamw_):
        with pytest.raises(ValueError, match="adamw: ") as error:
            step(**given)
        assert words in str(error.value)


@pytest.mark.parametrize("name", ["param", "exp_avg", "exp_avg_sq"])
def test_does_not_overwrite_what_is_expanded(name: str) -> None:
    """One number in several places; and nothing has been written when it is refused."""
    names = "param", "grad", "exp_avg", "exp_avg_sq"
    given = {n: x.float().to(DEVICE) for n, x in zip(names, tensors(5, 3), strict=True)}
    given[name] = given[name][:, :1].expand(5, 3)
    before = {n: x.clone() for n, x in given.items()}
    with pytest.raises(ValueError, match=rf"adamw: {name} of shape \(5, 3\) has strides \(3, 0\);"):
        adamw_(**given, step=1)
    assert all(torch.equal(x, before[n]) for n, x in given.items())
    for ours, want in zip(adamw(**given, step=1), adamw(**before, step=1), strict=True):
        assert torch.equal(ours, want)  # on copies it may be


# ------------------------------------------------------------------------------- the optimizer

SHAPES = ((5, 3), (7,), (), (2, 3, 4))


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    values = [numbers(*shape, seed=i, grad=False) for i, shape in enumerate(SHAPES)]
    return [nn.Parameter(x.to(DEVICE, dtype)) for x in values]


def take_step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], step: int) -> None:
    """Gradients of different sizes, a learning rate that changes, one parameter in half of the
    steps."""
    for group in optimizer.param_groups:
        group["lr"] = 0.02 / (1 + step)
    for i, p in enumerate(params):
        grad = numbers(*p.shape, seed=100 * step + i, grad=False) * 10.0 ** (i - 2)
        p.grad = None if i == 1 and step % 2 == 0 else grad.to(p.device, p.dtype)
    optimizer.step()


def assert_same(
    ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, tolerance: float
) -> None:
    """Parameters, the names and values of the state, and dtypes."""
    groups = zip(ours.param_groups, theirs.param_groups, strict=True)
    pairs = [pair for a, b in groups for pair in zip(a["params"], b["params"], strict=True)]
    close = dict(atol=tolerance, rtol=tolerance)
    for p, q in pairs:
        torch.testing.assert_close(p, q, **close)
        assert list(ours.state[p]) == list(theirs.state[q])
        for name, value in ours.state[p].items():
            torch.testing.assert_close(value, theirs.state[q][name], **close)


@pytest.mark.parametrize(
    "options", [dict(weight_decay=0.1), dict(betas=(0.5, 0.9), eps=1e-3, weight_decay=0.0)], ids=str
)
def test_twenty_steps(options: dict[str, Any]) -> None:
    a, b = parameters(), parameters()
    ours, other = AdamW(a, **options), torch.optim.AdamW(b, **options)
    for step in range(20):
        take_step(ours, a, step)
        take_step(other, b, step)
    assert_same(ours, other, 2e-6)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_twenty_steps_in_half_precision(dtype: torch.dtype) -> None:
    """At least as near to float32 as torch's."""
    exact, ours, theirs = parameters(dtype), parameters(dtype), parameters(dtype)
    exact = [nn.Parameter(p.detach().float()) for p in exact]
    a, b = AdamW(ours), torch.optim.AdamW(theirs, foreach=False)
    c = torch.optim.AdamW(exact)
    for step in range(20):
        take_step(a, ours, step)
        take_step(b, theirs, step)
        take_step(c, exact, step)
    mine, others = (
        sum((p.float() - q).abs().sum().item() for p, q in zip(params, exact, strict=True))
        for params in (ours, theirs)
    )
    assert 0 < mine < 1.5 * others


@pytest.mark.parametrize("other", [torch.optim.AdamW, PlainAdamW])
@pytest.mark.parametrize("first_is_ours", [True, False])
def test_either_loads_the_state_of_the_other(other: Any, first_is_ours: bool) -> None:
    """Five steps by one, five by the other, are ten by torch's."""
    first, second = (AdamW, other) if first_is_ours else (other, AdamW)
    params, expected = parameters(), parameters()
    before, whole = first(params, weight_decay=0.1), torch.optim.AdamW(expected, weight_decay=0.1)
    for step in range(5):
        take_step(before, params, step)
        take_step(whole, expected, step)
    after = second(params)
    after.load_state_dict(before.state_dict())
    for step in range(5, 10):
        take_step(after, params, step)
        take_step(whole, expected, step)
    assert_same(after, whole, 2e-6)


def test_the_step_is_in_place() -> None:
    params = parameters()
    optimizer = AdamW(params)
    take_step(optimizer, params, 1)
    held = [x for p in params for x in (p, *optimizer.state[p].values())]
    addresses = [x.data_ptr() for x in held]
    take_step(optimizer, params, 3)
    assert [x.data_ptr() for x in held] == addresses
    assert all(optimizer.state[p]["step"] == 2 for p in params)


def test_inside_the_backward_pass() -> None:
    a, b = parameters(), parameters()
    ours, theirs = AdamW(a), PlainAdamW(b)
    for params, optimizer in ((a, ours), (b, theirs)):
        with update_in_backward(optimizer):
            sum(p.square().sum() for p in params).backward()
    assert_same(ours, theirs, 1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(fused=True), "fused=True: the kernel cannot do that; use lm_from_scratch.optim"),
        (dict(betas=(torch.tensor(0.9), 0.999)), "the kernel takes numbers"),
        (dict(lr=-1.0), "lr=-1.0 must be finite"),
    ],
)
def test_refuses_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        AdamW(parameters(), **options)
    assert words in str(error.value)
    if set(options) == {"fused"}:  # and in a file
        params = parameters()
        optimizer = AdamW(params)
        with pytest.raises(ValueError, match="fused=True"):
            optimizer.load_state_dict(torch.optim.AdamW(params, **options).state_dict())


def test_refuses_an_expanded_parameter() -> None:
    with pytest.raises(
        ValueError, match=r"AdamW: parameter of shape \(4, 3\) has strides \(0, 1\);"
    ):
        AdamW([nn.Parameter(torch.ones(3, device=DEVICE).expand(4, 3))])


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (torch.float64, "Parameter of torch.float64: the kernel takes"),
        (torch.complex64, "a parameter is torch.complex64; AdamW takes real ones"),
    ],
)
def test_refuses_parameters(dtype: torch.dtype, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AdamW([nn.Parameter(torch.ones(2, dtype=dtype, device=DEVICE))])
