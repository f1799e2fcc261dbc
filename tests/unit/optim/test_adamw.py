"""optim/adamw.py: torch's AdamW step by step, and closed forms."""

import io
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids
from torch import Tensor, nn

from lm_from_scratch.optim.adamw import AdamW, adam_direction, adamw
from lm_from_scratch.training.loss import causal_lm_loss

F64 = torch.float64
SHAPES = ((5, 3), (7,), (), (2, 3, 4), (1, 1))

#: Largest difference to torch after ten steps of 0.01, relative to weights around 1.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 4e-2, torch.float16: 1e-2}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def parameters(dtype: torch.dtype = F64, shapes: tuple = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(normal(*s, seed=i, dtype=dtype)) for i, s in enumerate(shapes)]


def set_gradients(params: list, step: int) -> None:
    """Gradients of very different sizes, which depend on the step and on nothing else."""
    for i, p in enumerate(params):
        p.grad = normal(*p.shape, seed=1000 * step + i, dtype=p.dtype) * 10.0 ** (i % 4 - 2)


def same_states(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, tol: float) -> None:
    """The parameters, and every entry of the state, by value, dtype and shape."""
    groups = zip(ours.param_groups, theirs.param_groups, strict=True)
    pairs = [pair for a, b in groups for pair in zip(a["params"], b["params"], strict=True)]
    for p, q in pairs:
        torch.testing.assert_close(p, q, atol=tol, rtol=tol)
        mine, other = ours.state.get(p, {}), theirs.state.get(q, {})
        assert list(mine) == list(other)
        for name in mine:
            torch.testing.assert_close(mine[name], other[name], atol=tol, rtol=tol)


def against_torch(
    ours_options: dict, theirs_options: dict | None = None, dtype: torch.dtype = F64, steps: int = 6
) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    a = AdamW(ours, **ours_options)
    b = torch.optim.AdamW(theirs, **(ours_options if theirs_options is None else theirs_options))
    for step in range(steps):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        a.step()
        b.step()
        same_states(a, b, TOLERANCE[dtype])


# ---------------------------------------------------------------------- torch's, step by step


@given(
    lr=st.floats(1e-4, 0.5),
    betas=st.tuples(st.floats(0.0, 0.99), st.floats(0.0, 0.9999)),
    eps=st.sampled_from([0.0, 1e-12, 1e-8, 1e-3, 1.0]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.5, 3.0]),
    kernel=st.sampled_from([{}, {"fused": True}]),
)
def test_every_combination_of_options_equals_torch(kernel: dict, **options: object) -> None:
    against_torch({**options, **kernel}, {**options, "foreach": False})


def test_the_defaults_are_those_of_torch() -> None:
    ours, theirs = AdamW(parameters()).defaults, torch.optim.AdamW(parameters()).defaults
    assert ours.pop("optim_bits") == 32  # of ours alone, and torch has no other
    assert ours.items() <= theirs.items()
    against_torch({})


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_dtype_equals_torch(dtype: torch.dtype) -> None:
    options = dict(lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1, eps=1e-6)
    against_torch(options, {**options, "foreach": False}, dtype, steps=10)
    against_torch({**options, "fused": True}, {**options, "foreach": False}, dtype, steps=10)


@pytest.mark.parametrize("kernel", [{}, {"fused": True}], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_lr_and_betas_as_tensors(shape: tuple, kernel: dict) -> None:
    def options() -> dict:
        return dict(
            lr=torch.full(shape, 0.02, dtype=F64),
            betas=(torch.full(shape, 0.7, dtype=F64), torch.full(shape, 0.9, dtype=F64)),
        )

    ours, theirs = parameters(shapes=((5, 3), (7,))), parameters(shapes=((5, 3), (7,)))
    a, b = AdamW(ours, **options(), **kernel), torch.optim.AdamW(theirs, **options())
    for step in range(4):
        for params, optimizer in ((ours, a), (theirs, b)):
            set_gradients(params, step)
            optimizer.step()
            optimizer.param_groups[0]["lr"].mul_(0.5)  # in place, as a captured graph sees it
    same_states(a, b, 1e-13)


def test_gradients_of_the_pure_function() -> None:
    def new_weight(param: Tensor, grad: Tensor, m: Tensor, v: Tensor, lr: Tensor) -> Tensor:
        return adamw(param, grad, m, v.square(), 3, lr, eps=1e-3)[0]

    inputs = [normal(4, seed=i).requires_grad_() for i in range(4)]
    lr = torch.tensor(0.1, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(new_weight, (*inputs, lr))


def test_the_step_leaves_no_graph() -> None:
    (p,) = parameters(shapes=((3,),))
    optimizer = AdamW([p], lr=torch.tensor(0.1, requires_grad=True))
    set_gradients([p], 0)
    optimizer.step()
    assert p.is_leaf and not any(t.requires_grad for t in optimizer.state[p].values())


def test_the_class_is_the_pure_function() -> None:
    (p,) = parameters(shapes=((5, 3),))
    optimizer = AdamW([p], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)
    want, m, v = p.detach().clone(), torch.zeros(5, 3, dtype=F64), torch.zeros(5, 3, dtype=F64)
    for step in range(1, 5):
        set_gradients([p], step)
        before = [t.clone() for t in (want, p.grad, m, v)]
        inputs = (want, p.grad, m, v)
        direction, *_ = adam_direction(p.grad, m, v, step, (0.8, 0.9), 1e-3)
        result = adamw(*inputs, step, 0.1, (0.8, 0.9), 1e-3, 0.2)
        assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))  # pure
        torch.testing.assert_close(result[0], 0.98 * want - 0.1 * direction)
        want, m, v = result
        optimizer.step()
        assert torch.equal(p, want)
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], v)


# ----------------------------------------------------- the formula, written out and by hand


def test_the_formula_in_plain_numbers() -> None:
    rng = [float(x) for x in normal(12, seed=3)]
    theta, m, v, eta, lam, b1, b2, eps = 0.7, 0.0, 0.0, 0.05, 0.3, 0.8, 0.95, 1e-2
    p = nn.Parameter(torch.tensor(theta, dtype=F64))
    optimizer = AdamW([p], lr=eta, betas=(b1, b2), eps=eps, weight_decay=lam)
    for t, g in enumerate(rng, start=1):
        p.grad = torch.tensor(g, dtype=F64)
        optimizer.step()
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        d = (m / (1 - b1**t)) / (math.sqrt(v / (1 - b2**t)) + eps)
        theta = (1 - eta * lam) * theta - eta * d
        assert p.item() == pytest.approx(theta, rel=1e-13)


def stepped(p0: float, grads: list[float], **options: object) -> list[float]:
    """The weight after each step."""
    p = nn.Parameter(torch.tensor([p0], dtype=F64))
    optimizer, seen = AdamW([p], **{"weight_decay": 0.0, "eps": 0.0, **options}), []
    for grad in grads:
        p.grad = torch.tensor([grad], dtype=F64)
        optimizer.step()
        seen.append(p.item())
    return seen


@pytest.mark.parametrize("grad", [3.0, -3.0, 1e-9, -1e9])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5), (0.99, 0.0)])
def test_the_first_step_is_lr_times_the_sign(grad: float, betas: tuple) -> None:
    (after,) = stepped(1.0, [grad], lr=0.01, betas=betas)
    assert after == pytest.approx(1.0 - math.copysign(0.01, grad), rel=1e-12)


def test_a_constant_gradient_gives_steps_of_lr() -> None:
    assert stepped(0.0, [7.0] * 20, lr=0.01)[-1] == pytest.approx(-0.2, rel=1e-11)


@given(factor=st.sampled_from([1e-6, 0.5, 1e6]))
def test_the_scale_of_the_loss_leaves_no_trace_without_eps(factor: float) -> None:
    grads = [float(g) for g in normal(8, seed=2)]
    want = stepped(1.0, grads, lr=0.1)
    got = stepped(1.0, [factor * g for g in grads], lr=0.1)
    assert got == pytest.approx(want, rel=1e-10)


def test_decay_alone() -> None:
    # no gradient signal: the decay works on the weight, not through the moments
    got = stepped(2.0, [0.0] * 10, lr=0.1, weight_decay=0.5, eps=1e-8)
    assert got == pytest.approx([2.0 * 0.95**t for t in range(1, 11)], rel=1e-13)


def test_decay_is_no_L2_penalty() -> None:
    """A penalty would be divided by the gradient's size; the decay is not."""
    for size in (1.0, 1000.0):
        (with_decay,) = stepped(2.0, [size], lr=0.1, weight_decay=0.5)
        assert with_decay == pytest.approx(2.0 * 0.95 - 0.1, rel=1e-12)
        p = nn.Parameter(torch.tensor([2.0], dtype=F64))
        penalty = torch.optim.Adam([p], lr=0.1, weight_decay=0.5, eps=0.0)
        p.grad = torch.tensor([size], dtype=F64)
        penalty.step()
        assert p.item() == pytest.approx(1.9, rel=1e-12)


def test_the_decay_comes_before_the_step() -> None:
    (after,) = stepped(1.0, [1.0], lr=0.5, weight_decay=1.0)
    assert after == pytest.approx(0.5 * 1.0 - 0.5)  # after the step it would be 0.25


def test_eps_is_added_after_the_bias_correction() -> None:
    grad, eps, lr = 1e-6, 1e-6, 5e-3
    (inside,) = stepped(0.0, [grad], lr=lr, eps=eps)
    assert inside == pytest.approx(-lr * grad / (grad + eps), rel=1e-12)
    outside = lr * grad / (grad + eps / math.sqrt(1 - 0.999))  # the defect: eps is 31.6 times eps
    assert outside < 0.1 * -inside


# ---------------------------------------------------------------------------- models and groups


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen2])
def test_a_model_trains_as_with_torch(make: Callable) -> None:
    # in float64: the bias of the keys has no gradient but rounding, which Adam would blow up
    ours, theirs = make().double(), make().double()
    a = AdamW(ours.parameters(), lr=1e-2, weight_decay=0.1)
    b = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    for i in range(4):
        idx, targets = token_ids(2, 9, seed=i), token_ids(2, 9, seed=i + 50)
        for model, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            causal_lm_loss(model(idx), targets).backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)


def test_groups_with_options_of_their_own_and_one_added_later() -> None:
    def groups(params: list) -> list[dict]:
        return [
            {"params": params[:2], "weight_decay": 0.0, "betas": (0.5, 0.6)},
            {"params": iter(params[2:4]), "lr": 0.3, "fused": True},
        ]

    ours, theirs = parameters(), parameters()
    a, b = AdamW(groups(ours), lr=0.1), torch.optim.AdamW(groups(theirs), lr=0.1)
    for step in range(6):
        if step == 3:
            a.add_param_group({"params": ours[4], "eps": 0.1})
            b.add_param_group({"params": theirs[4], "eps": 0.1})
            ours[0].requires_grad_(False)
            theirs[0].requires_grad_(False)
        set_gradients(ours, step)
        set_gradients(theirs, step)
        a.step()
        b.step()
        same_states(a, b, 1e-13)
    assert [len(group["params"]) for group in a.param_groups] == [2, 2, 1]
    with pytest.raises(ValueError, match="more than one parameter group"):
        a.add_param_group({"params": [ours[0]]})


# --------------------------------------------------------------------- state dicts and copies


def go_on(optimizer: torch.optim.Optimizer, first: int, last: int) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, last):
        set_gradients(params, step)
        optimizer.step()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("cls", [AdamW, torch.optim.AdamW], ids=["to ours", "to torch"])
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_a_state_dict_moves_both_ways(cls: type, options: dict) -> None:
    other = torch.optim.AdamW if cls is AdamW else AdamW
    start = other(parameters(), lr=0.1, weight_decay=0.2, **options)
    at_3 = go_on(start, 0, 3)
    file = io.BytesIO()
    torch.save(start.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed = cls([nn.Parameter(p) for p in at_3], lr=999.0, **options)
    resumed.load_state_dict(state)
    same_states(resumed, start, 0.0)
    for a, b in zip(go_on(resumed, 3, 7), go_on(start, 3, 7), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    if cls is torch.optim.AdamW:
        assert resumed.param_groups[0]["decoupled_weight_decay"] is True


@pytest.mark.parametrize("option", ["foreach", "capturable"])
def test_how_torch_computed_a_state_does_not_matter(option: str) -> None:
    theirs = torch.optim.AdamW(parameters(), lr=0.3, **{option: True})
    ours = AdamW(parameters())
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.3 and option not in ours.param_groups[0]


def test_a_learning_rate_of_shape_1_moves_a_number() -> None:
    ours, theirs = torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.tensor(2.0))
    for p, kind in ((ours, AdamW), (theirs, torch.optim.AdamW)):
        optimizer = kind([p], lr=torch.tensor([0.1]))
        p.grad = torch.tensor(3.0)
        optimizer.step()
    torch.testing.assert_close(ours, theirs)
