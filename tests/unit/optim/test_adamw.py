"""optim/adamw.py: torch's AdamW step by step, closed forms, and what it refuses."""

import copy
import io
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids
from torch import Tensor, nn

from lm_from_scratch.optim.adamw import AdamW, adam_direction, adamw
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.training.loss import causal_lm_loss

F64 = torch.float64
SHAPES = ((5, 3), (7,), (), (2, 3, 4), (1, 1))

#: Largest difference to torch after ten steps of 0.01, relative to weights around 1.
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.bfloat16: 4e-2,
    torch.float16: 1e-2,
}


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


def test_steps_are_counted_per_parameter() -> None:
    first, late = (nn.Parameter(torch.zeros(1, dtype=F64)) for _ in range(2))
    optimizer = AdamW([first, late], lr=0.01, weight_decay=0.0)
    for t in range(1, 11):
        first.grad = torch.ones(1, dtype=F64)
        late.grad = torch.ones(1, dtype=F64) if t == 10 else None
        optimizer.step()
        assert (late in optimizer.state) == (t == 10)
    assert late.item() == pytest.approx(-0.01, rel=1e-6)  # with one count it is about -0.0048
    assert optimizer.state[first]["step"] == 10 and optimizer.state[late]["step"] == 1
    late.grad, before = None, late.item()
    optimizer.step()
    assert late.item() == before and optimizer.state[late]["step"] == 1


# ------------------------------------------------------- as an optimizer of torch: conventions


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


@pytest.mark.parametrize("cls", [AdamW, GaLore])
def test_a_generator_of_parameters_is_read_once(cls: type) -> None:
    model = nn.Linear(3, 2)
    optimizer = cls([{"params": model.parameters()}])
    optimizer.add_param_group({"params": iter(parameters())})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, len(SHAPES)]


def test_named_parameters_keep_their_names() -> None:
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def test_a_closure_is_called_once_with_gradients_on() -> None:
    (p,) = parameters(shapes=((3,),))
    optimizer, calls = AdamW([p], lr=0.1), []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    before = p.detach().square().sum()
    with torch.no_grad():
        assert torch.equal(optimizer.step(closure).detach(), before)
    assert calls == [True] and p.detach().square().sum() < before
    assert optimizer.step() is None


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1, dtype=F64)], ids=["number", "tensor"])
def test_schedulers(lr: float | Tensor) -> None:
    from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        parts = [LinearLR(optimizer, 0.25, total_iters=3), CosineAnnealingLR(optimizer, 5)]
        return SequentialLR(optimizer, parts, [3])

    ours, theirs = parameters(), parameters()
    a = AdamW(ours, lr=copy.deepcopy(lr))
    b = torch.optim.AdamW(theirs, lr=copy.deepcopy(lr))
    schedules = [schedule(a), schedule(b)]
    for step in range(8):
        for params, optimizer, rates in zip((ours, theirs), (a, b), schedules, strict=True):
            set_gradients(params, step)
            optimizer.step()
            rates.step()
        same_states(a, b, 1e-13)
    OneCycleLR(AdamW(parameters()), 0.1, total_steps=5)  # moves the betas too
    # a schedule that goes on where it stopped wants this key, which no default has
    resumed = AdamW([{"params": parameters(), "initial_lr": 0.1}])
    assert LinearLR(resumed, last_epoch=3).last_epoch == 4


def test_hooks_around_the_step_run() -> None:
    (p,) = parameters(shapes=((3,),))
    optimizer, seen = AdamW([p]), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    set_gradients([p], 0)
    optimizer.step()
    assert seen == ["before", "after"]


def test_a_gradient_scaler_skips_a_step_that_overflowed() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    p = nn.Parameter(torch.ones(2))
    optimizer = AdamW([p], lr=0.1, weight_decay=0.0)
    for value, want in ((1.0, 0.9), (math.inf, 0.9), (1.0, 0.8)):
        optimizer.zero_grad()
        scaler.scale((p * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(p.detach(), torch.full((2,), want), atol=1e-5, rtol=0)


def test_weights_and_gradients_in_any_layout() -> None:
    ours = [nn.Parameter(normal(6, 4).t()), nn.Parameter(normal(2, 3, 4, 5, seed=1))]
    ours[1].data = ours[1].data.to(memory_format=torch.channels_last)
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    a, b = AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for step in range(3):
        for params, optimizer in ((ours, a), (theirs, b)):
            set_gradients(params, step)
            params[0].grad = params[0].grad.t().contiguous().t()
            optimizer.step()
        same_states(a, b, 1e-13)
    assert all(a.state[p]["exp_avg"].stride() == p.stride() for p in ours)


def test_a_state_is_there_after_the_first_step_only_and_as_announced() -> None:
    params = parameters()
    optimizer = AdamW([{"params": params[:3]}, {"params": params[3:], "fused": True}])
    announced = [optimizer.state_shapes(p) for p in params]
    assert len(optimizer.state) == 0
    set_gradients(params, 0)
    optimizer.step()
    for p, shapes in zip(params, announced, strict=True):
        assert {name: t.shape for name, t in optimizer.state[p].items()} == shapes
    with pytest.raises(ValueError, match=r"shape \(4, 4\) is in none of the groups"):
        optimizer.state_shapes(nn.Parameter(torch.zeros(4, 4)))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_a_run_that_was_saved_goes_on_bit_for_bit(dtype: torch.dtype, fused: bool) -> None:
    whole = AdamW(parameters(dtype), lr=0.1, fused=fused)
    go_on(whole, 0, 3)
    ways: list[Callable] = [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
    copies = [way(whole) for way in ways]
    saved = AdamW([nn.Parameter(p.detach().clone()) for p in whole.param_groups[0]["params"]])
    state = copy.deepcopy(whole.state_dict())  # it holds the tensors themselves
    for entries in state["state"].values():  # the order in a file may be any
        for name in sorted(entries, reverse=True):
            entries[name] = entries.pop(name)
    saved.load_state_dict(state)
    want = go_on(whole, 3, 6)
    for optimizer in (*copies, saved):
        assert all(torch.equal(*pair) for pair in zip(go_on(optimizer, 3, 6), want, strict=True))


# ----------------------------------------------------------------------------- what it refuses


def snapshot(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = [t for p in params for t in optimizer.state.get(p, {}).values()]
    return [t.detach().clone() for t in (*params, *state)]


def sparse_gradient(p: Tensor) -> Tensor:
    return torch.ones_like(p).to_sparse()


def bad_number(value: float) -> Callable[[Tensor], Tensor]:
    def grad(p: Tensor) -> Tensor:
        out = torch.ones_like(p)
        out.view(-1)[-1] = value
        return out

    return grad


BAD = {
    "sparse": (sparse_gradient, ValueError, r"parameter 1, shape \(7,\), is sparse .*SparseAdam"),
    "nan": (bad_number(math.nan), FloatingPointError, r"parameter 1, shape \(7,\), is not finite"),
    "inf": (bad_number(math.inf), FloatingPointError, "is not finite: nothing was changed"),
    "-inf": (bad_number(-math.inf), FloatingPointError, "is not finite"),
}


@pytest.mark.parametrize("kernel", [{}, {"fused": True}], ids=str)
@pytest.mark.parametrize("had_steps", [False, True])
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_gradient_in_the_last_place_changes_nothing(kind, had_steps, kernel) -> None:
    params = parameters(torch.float32, ((5, 3), (2, 2), (4,), (7,)))
    optimizer = AdamW([{"params": params[:2]}, {"params": params[2:]}], weight_decay=0.5, **kernel)
    if had_steps:
        go_on(optimizer, 0, 2)
    before = snapshot(optimizer)
    set_gradients(params, 5)
    make, error, message = BAD[kind]
    params[-1].grad = make(params[-1])
    with pytest.raises(error, match=message):
        optimizer.step()
    after = snapshot(optimizer)
    assert len(after) == len(before)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    set_gradients(params, 5)
    optimizer.step()  # and it can go on


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float32, 3e38), (torch.float16, 6e4), (torch.bfloat16, 3e38), (F64, 1e300)],
    ids=str,
)
def test_a_sum_that_overflows_is_no_false_alarm(dtype: torch.dtype, value: float) -> None:
    p = nn.Parameter(torch.ones(3, dtype=dtype))
    p.grad = torch.full((3,), value, dtype=dtype)
    assert not math.isfinite(p.grad.sum().float())
    AdamW([p], lr=0.1).step()
    assert p.isfinite().all()


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"^lr=-1\.0 must be finite and not negative"),
        ({"lr": NAN}, "^lr=nan must be"),
        ({"lr": INF}, "^lr=inf must be"),
        ({"lr": torch.tensor(-1.0)}, "^lr=-1.0 must be"),
        ({"lr": torch.ones(2)}, "must be single numbers"),
        ({"betas": (torch.ones(2) / 2, 0.9)}, "must be single numbers"),
        ({"eps": -1e-8}, r"^eps=-1e-08 must be"),
        ({"eps": NAN}, "^eps=nan must be"),
        ({"weight_decay": -0.1}, r"^weight_decay=-0\.1 must be"),
        ({"weight_decay": INF}, "^weight_decay=inf must be"),
        ({"betas": (1.0, 0.9)}, r"^betas=\(1\.0, 0\.9\) must be two numbers in \[0, 1\)"),
        ({"betas": (0.9, 1.0)}, "^betas="),
        ({"betas": (-0.1, 0.9)}, "^betas="),
        ({"betas": (0.9, NAN)}, "^betas="),
        ({"betas": (0.9,)}, "^betas="),
        ({"betas": (0.9, 0.9, 0.9)}, "^betas="),
    ],
)
def test_bad_options_are_refused_by_name(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamW(parameters(), **options)
    with pytest.raises(ValueError, match=message):
        AdamW([{"params": parameters(), **options}])
    params = parameters()
    optimizer = AdamW(params[:1])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": params[1:], **options})
    assert len(optimizer.param_groups) == 1


def test_a_typo_is_refused() -> None:
    with pytest.raises(TypeError, match="weigth_decay"):
        AdamW(parameters(), weigth_decay=0.1)
    with pytest.raises(ValueError, match=r"^'weigth_decay' is no option of AdamW, which has \['be"):
        AdamW([{"params": parameters(), "weigth_decay": 0.1}])
    optimizer = AdamW(parameters())
    with pytest.raises(ValueError, match="'rank' is no option of AdamW"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "rank": 4})
    with pytest.raises(ValueError, match="empty parameter list"):
        AdamW([])


def test_complex_parameters_are_refused_at_once() -> None:
    z = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    for params in ([z], [("z", z)], [{"params": z}], iter([z])):
        with pytest.raises(ValueError, match=r"torch\.complex64; AdamW takes real ones"):
            AdamW(params)


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_a_state_of_another_step_is_refused(option: str) -> None:
    theirs = torch.optim.AdamW(parameters(), **{option: True})
    ours = AdamW(parameters())
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(ValueError, match=f"the state has {option}=True"):
        ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == before


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


def test_state_of_another_optimizer_is_refused_before_anything_changes() -> None:
    p = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = AdamW([p])
    p.grad = torch.ones(4, 3)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    others = {
        "no option": torch.optim.SGD([p], momentum=0.9),
        "L2 penalty": torch.optim.Adam([p]),
        "is no option of AdamW": GaLore([p], rank=2),
    }
    for message, other in others.items():
        other.step()
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(other.state_dict())
    narrow = AdamW([torch.nn.Parameter(torch.ones(2))])
    narrow.param_groups[0]["params"][0].grad = torch.ones(2)
    narrow.step()
    with pytest.raises(ValueError, match=r"shape \(4, 3\) has shape \(2,\)"):
        optimizer.load_state_dict(narrow.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for name, value in before["state"][0].items():
        assert torch.equal(after["state"][0][name], value)


def test_betas_are_two_numbers() -> None:
    with pytest.raises(ValueError, match=r"betas=0\.9 must be two numbers"):
        AdamW([torch.nn.Parameter(torch.ones(2))], betas=0.9)
