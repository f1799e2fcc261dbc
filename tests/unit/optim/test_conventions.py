"""What every optimizer here promises, as an optimizer of torch: a row each."""

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR

from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.optim.muon import Muon

#: Vectors, matrices of all forms, a convolution, and one that 8 bits are kept of.
SHAPES = ((7,), (7, 4), (4, 7), (), (2, 3, 4), (64, 65))
LAST = len(SHAPES) - 1

GALORE: Any = partial(GaLore, rank=2, update_proj_gap=4, moments="rotate", max_drift=0.9)
WIDE_GALORE: Any = partial(GALORE, rank=64)  # its moments are large enough for 8 bits
OPTIMIZERS: dict[str, Any] = {
    "adamw": AdamW,
    "fused adamw": partial(AdamW, fused=True),
    "adamw in 8 bits": partial(AdamW, optim_bits=8),
    "galore": GALORE,
    "fused galore": partial(GALORE, fused=True),
    "random galore": partial(GALORE, projection_type="random", seed=3),
    "galore in 8 bits": partial(WIDE_GALORE, optim_bits=8),
    "fused galore in 8 bits": partial(WIDE_GALORE, optim_bits=8, fused=True),
    "muon": partial(Muon, momentum=0.9),
    "muon in bfloat16": partial(Muon, momentum=0.9, ns_dtype="bfloat16"),
}
every = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(normal(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(SHAPES)]


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_gradients(params: Iterable[Tensor], step: int) -> None:
    """Gradients of very different sizes, which depend on the step and on nothing else."""
    for i, p in enumerate(params):
        p.grad = normal(*p.shape, seed=1000 * (step + 1) + i, dtype=p.dtype) * 10.0 ** (i % 4 - 2)


def steps(optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        set_gradients(params_of(optimizer), step)
        optimizer.step()


def snapshot(optimizer: Optimizer) -> list[Any]:
    """Every parameter and every entry of the state, copied."""
    params = params_of(optimizer)
    return copy.deepcopy([[p.detach(), dict(optimizer.state.get(p, {}))] for p in params])


def assert_same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ------------------------------------------------------------------------------ groups and options


@every
def test_named_parameters_generators_and_groups_are_the_same_parameters(make) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    ends = []
    for given in (
        lambda m: m.named_parameters(),
        lambda m: m.parameters(),
        lambda m: [{"params": m.parameters()}],
        lambda m: [{"params": m.named_parameters()}],
    ):
        optimizer = make(given(copy.deepcopy(model)))
        assert [len(group["params"]) for group in optimizer.param_groups] == [4]
        steps(optimizer, 0, 2)
        ends.append(snapshot(optimizer))
    for other in ends[1:]:
        assert_same(other, ends[0])
    named = make(model.named_parameters())
    assert named.state_dict()["param_groups"][0]["param_names"][1] == "0.bias"


@every
def test_a_group_added_later_takes_the_defaults_and_its_own_options(make) -> None:
    params = parameters()
    optimizer = make(params[:2], lr=0.1)
    steps(optimizer, 0, 2)
    optimizer.add_param_group({"params": iter(params[2:]), "lr": 0.0, "weight_decay": 0.5})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)
    before = snapshot(optimizer)
    steps(optimizer, 2, 3)
    for (old, _), p, moved in zip(before, params, [True] * 2 + [False] * 4, strict=True):
        assert torch.equal(old, p) != moved
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [params[0]]})


NAN, INF = math.nan, math.inf

REFUSED: dict[Any, list[tuple[dict, str]]] = {
    AdamW: [
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
        ({"betas": 0.9}, r"^betas=0\.9 must be two numbers in \[0, 1\)"),
        *(
            ({"betas": betas}, "^betas=.* must be two numbers in")
            for betas in ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, NAN), (0.9,), (0.9,) * 3)
        ),
        *(({"optim_bits": n}, f"^optim_bits={n!r} must be 8 or 32") for n in (4, 16, 0, None, "8")),
    ],
    GaLore: [
        *(({"rank": n}, f"^rank={n} must be None or a whole") for n in (0, -1, 2.0, True)),
        *(({"update_proj_gap": n}, f"^update_proj_gap={n} must be None") for n in (0, 1.5)),
        *(({"scale": x}, f"^scale={x} must be above 0 and") for x in (0.0, -1.0, NAN, INF)),
        *(({"max_drift": x}, f"^max_drift={x}") for x in (0.0, 1.0, NAN)),
        *(({"seed": x}, f"^seed={x!r}") for x in ("a", -1)),
        ({"projection_type": "both"}, "^projection_type='both' must be one of"),
        ({"basis": "lanczos"}, "^basis='lanczos' must be one of"),
        ({"moments": "forget"}, "^moments='forget' must be one of"),
        ({"lr": -1.0}, "^lr=-1.0 must be"),
        ({"optim_bits": 4}, "^optim_bits=4 must be"),
    ],
    Muon: [
        *(
            ({"momentum": x}, f"^momentum={x} must be None or in \\[0, 1\\)")
            for x in (1.0, -0.1, NAN)
        ),
        *(({"ns_steps": n}, f"^ns_steps={n} must be a whole number fr") for n in (0, 100, 2.0)),
        ({"ns_coefficients": (1.0, 2.0)}, r"^ns_coefficients=\(1\.0, 2\.0\) must be three numbers"),
        ({"adjust_lr_fn": "rms"}, "^adjust_lr_fn='rms' must be one of"),
        ({"ns_dtype": "float16"}, "^ns_dtype='float16' must be one of"),
        ({"scale": 0.0}, r"^scale=0\.0 must be above 0"),
        ({"optim_bits": 8, "momentum": 0.9}, "^optim_bits=8 is for AdamW and GaLore"),
        ({"lr": -1.0}, r"^lr=-1\.0 must be finite"),
    ],
}
ROWS = [(cls, *row) for cls, rows in REFUSED.items() for row in rows]


@pytest.mark.parametrize(("cls", "options", "message"), ROWS)
def test_bad_options_are_refused_by_name_wherever_they_are_given(cls, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        cls(parameters(), **options)
    with pytest.raises(ValueError, match=message):
        cls([{"params": parameters(), **options}])
    optimizer = cls(parameters())
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": parameters(), **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("cls", REFUSED)
def test_a_typo_and_the_options_of_others_are_refused(cls: Any) -> None:
    with pytest.raises(TypeError, match="weigth_decay"):
        cls(parameters(), weigth_decay=0.1)
    for name in ("weigth_decay", "proj_type", "amsgrad", "foreach", "capturable", "differentiable"):
        with pytest.raises(ValueError, match=f"^'{name}' is no option of {cls.__name__}, which ha"):
            cls([{"params": parameters(), name: True}])
    other = {AdamW: "rank", GaLore: "momentum", Muon: "rank"}[cls]
    with pytest.raises(ValueError, match=f"'{other}' is no option of {cls.__name__}"):
        cls(parameters()).add_param_group({"params": parameters(), other: 4})
    with pytest.raises(ValueError, match="empty parameter list"):
        cls([])


@pytest.mark.parametrize("cls", REFUSED)
def test_complex_parameters_are_refused_at_once(cls: Any) -> None:
    z = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    for params in ([z], [("z", z)], [{"params": z}], iter([z])):
        with pytest.raises(ValueError, match=rf"complex64; {cls.__name__} takes real ones"):
            cls(params)


# ---------------------------------------------------------------------------------------- the step


@every
def test_a_closure_is_called_once_with_gradients_on(make) -> None:
    p = nn.Parameter(torch.ones(7, 4))
    optimizer, calls = make([p], lr=0.1), []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 28.0
    assert calls == [True] and p.detach().square().sum() < 28.0
    assert optimizer.step() is None


@every
def test_hooks_around_the_step_run_and_it_leaves_no_graph(make) -> None:
    optimizer, order = make(parameters()), []
    optimizer.register_step_pre_hook(lambda *_: order.append("before"))
    optimizer.register_step_post_hook(lambda *_: order.append("after"))
    steps(optimizer, 0, 1)
    assert order == ["before", "after"]
    for p in params_of(optimizer):
        assert p.is_leaf and not any(value.requires_grad for value in optimizer.state[p].values())


@every
def test_a_parameter_without_gradient_is_left_alone_and_steps_are_its_own(make) -> None:
    params, alone = parameters(), parameters()
    optimizer, other = make([{"params": []}, {"params": params}]), make(alone)
    optimizer.step()
    assert not optimizer.state
    for step in range(9):  # all but the last, which comes late
        set_gradients(params[:LAST], step)
        optimizer.step()
        assert params[LAST] not in optimizer.state
    assert_same(params[LAST].detach(), alone[LAST].detach())
    for p in (*params, *alone):
        p.grad = None
    for step in range(6):
        for late, twin in ((params[LAST], optimizer), (alone[LAST], other)):
            set_gradients([late], step)
            twin.step()
    assert_same(snapshot(optimizer)[LAST], snapshot(other)[LAST])


@every
def test_a_learning_rate_may_be_a_tensor_and_may_be_scheduled(make) -> None:
    ends = []
    for lr in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        optimizer = make(parameters(torch.float64), lr=lr)
        parts = [LinearLR(optimizer, 0.25, total_iters=3), CosineAnnealingLR(optimizer, 5)]
        schedule, rates = SequentialLR(optimizer, parts, [3]), []
        for step in range(8):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            steps(optimizer, step, step + 1)
            schedule.step()
        ends.append([p.detach() for p in params_of(optimizer)])
        assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1]) and rates[-1] < 0.05
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-6)
    OneCycleLR(make(parameters()), 0.1, total_steps=5)  # moves the betas too
    # a schedule that goes on where it stopped wants this key, which no default has
    resumed = make([{"params": parameters(), "initial_lr": 0.1}])
    assert LinearLR(resumed, last_epoch=3).last_epoch == 4


@every
def test_a_gradient_scaler_skips_a_step_that_overflowed(make) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    p = nn.Parameter(torch.ones(3, 2))
    optimizer, ends = make([p], lr=0.1), []
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((p * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        ends.append(p.detach().clone())
    assert torch.equal(ends[0], ends[1]) and (ends[2] < ends[1]).all()


@every
def test_the_order_in_memory_does_not_matter(make) -> None:
    shapes = ((64, 65), (4, 7), (2, 3, 4, 5), (6, 7))
    plain = [nn.Parameter(normal(*shape, seed=1)) for shape in shapes]
    turned = [nn.Parameter(p.detach().mT.contiguous().mT) for p in plain]
    turned[2].data = plain[2].detach().to(memory_format=torch.channels_last)
    turned[3].data = torch.zeros(12, 21)[::2, ::3].copy_(plain[3].detach())  # holes in memory
    assert not any(p.is_contiguous() for p in turned)
    a, b = make(plain, eps=1e-3), make(turned, eps=1e-3)
    for step in range(3):
        steps(a, step, step + 1)
        for p, q in zip(plain, turned, strict=True):
            q.grad = torch.empty_like(q).copy_(p.grad)
        b.step()
    for p, q in zip(plain, turned, strict=True):
        torch.testing.assert_close(q.detach(), p.detach(), rtol=1e-4, atol=1e-4)
        if q is turned[3]:
            continue
        for state in [b.state[q]] if not {"left", "right"} & b.state[q].keys() else []:
            moments = [x for x in state.values() if x.shape == q.shape and x.is_floating_point()]
            assert all(x.stride() == q.stride() for x in moments)  # one pass over memory for all


# -------------------------------------------------------------------------------------- the state


@every
def test_a_state_is_there_after_the_first_step_only_and_as_announced(make) -> None:
    optimizer = make(parameters())
    announced = [optimizer.state_shapes(p) for p in params_of(optimizer)]
    assert not optimizer.state
    for step in range(3):
        steps(optimizer, step, step + 1)
        states = [optimizer.state[p] for p in params_of(optimizer)]
        assert [{name: x.shape for name, x in state.items()} for state in states] == announced
    with pytest.raises(ValueError, match=r"shape \(4, 4\) is in none of the groups"):
        optimizer.state_shapes(nn.Parameter(torch.zeros(4, 4)))


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FEW_DTYPES = [
    pytest.param(dtype, marks=[pytest.mark.slow] * (i % 2)) for i, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize("dtype", FEW_DTYPES, ids=str)
@every
def test_a_run_that_was_saved_or_copied_goes_on_bit_for_bit(make, dtype) -> None:
    optimizer = make(parameters(dtype), lr=0.05, eps=1e-3)
    steps(optimizer, 0, 3)  # in the middle of a gap
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    assert_same([snapshot(twin) for twin in copies], [snapshot(optimizer)] * 2)
    weights, state = through_a_file([[p.detach() for p in params_of(optimizer)], {}])
    for turned in (False, True):  # the order in a file may be any
        state = through_a_file(optimizer.state_dict())
        for entries in state["state"].values() if turned else ():
            for name in sorted(entries, reverse=True):
                entries[name] = entries.pop(name)
        resumed = make([nn.Parameter(w.clone()) for w in weights], lr=999.0)
        resumed.load_state_dict(state)
        for p, q in zip(params_of(resumed), params_of(optimizer), strict=True):
            for name, value in optimizer.state[q].items():
                loaded = resumed.state[p][name]
                assert loaded.dtype == value.dtype and torch.equal(loaded, value), name
                assert loaded.data_ptr() != value.data_ptr(), name
        copies.append(resumed)
    steps(optimizer, 3, 7)
    for twin in copies:
        steps(twin, 3, 7)
        assert_same(snapshot(twin), snapshot(optimizer))


def of_torch(cls: Any, **options: Any) -> Optimizer:
    params = [p for p in parameters() if p.dim() == 2] if cls is torch.optim.Muon else parameters()
    return cls(params, **options)


OTHERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": partial(of_torch, torch.optim.SGD, momentum=0.9),
    "adam": partial(of_torch, torch.optim.Adam),
    "torch's amsgrad": partial(of_torch, torch.optim.AdamW, amsgrad=True),
    "torch's maximize": partial(of_torch, torch.optim.AdamW, maximize=True),
    "torch's muon": partial(of_torch, torch.optim.Muon),
    **{name: lambda make=make: make(parameters()) for name, make in OPTIMIZERS.items()},
}
LOADS = {  # what of others an optimizer may be given
    "adamw": {"fused adamw", "adamw in 8 bits"},
    "galore": {name for name in OPTIMIZERS if "galore" in name},
    "muon": {"muon in bfloat16"},
}


@pytest.mark.parametrize("name", LOADS)
def test_the_state_of_another_optimizer_is_refused_before_anything_changes(name) -> None:
    optimizer = OPTIMIZERS[name](parameters())
    steps(optimizer, 0, 1)
    before, groups = snapshot(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    for label in OTHERS.keys() - LOADS[name] - {name}:
        other = OTHERS[label]()
        steps(other, 0, 1)
        with pytest.raises(ValueError, match=r"no option|penalty|=True|size of|differ"):
            optimizer.load_state_dict(other.state_dict())
        assert_same(snapshot(optimizer), before)
        assert optimizer.state_dict()["param_groups"] == groups


@every
def test_a_state_that_does_not_fit_is_refused_before_anything_changes(make) -> None:
    optimizer = make(parameters())
    steps(optimizer, 0, 1)
    before = snapshot(optimizer)
    good = optimizer.state_dict()["state"][LAST]
    names = [name for name, value in good.items() if value.dim()]
    for name, wrong in itertools.product(names, (None, torch.zeros(3), [1.0])):
        state = copy.deepcopy(optimizer.state_dict())
        state["state"][LAST] = {**good, name: wrong}
        with pytest.raises(ValueError, match=rf"'{name}' .*\(64, 65\) has shape .*, expected \("):
            optimizer.load_state_dict(state)
        assert_same(snapshot(optimizer), before)
    more = copy.deepcopy(optimizer.state_dict())
    more["state"][0]["more"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"'more' .* has shape \(7,\), expected None"):
        optimizer.load_state_dict(more)


# ---------------------------------------------------------------------------------- bad gradients


def with_last(value: float) -> Callable[[Tensor], Tensor]:
    """A gradient of ones whose last number is another."""
    return lambda p: torch.cat([torch.ones(p.numel() - 1), torch.tensor([value])]).view_as(p)


BAD: dict[str, tuple[Callable, type[Exception], str]] = {
    "sparse": (lambda p: torch.ones_like(p).to_sparse(), ValueError, "is sparse .*SparseAdam"),
    "nan": (with_last(NAN), FloatingPointError, "is not finite: nothing was changed"),
    "inf": (with_last(INF), FloatingPointError, "is not finite"),
    "-inf": (with_last(-INF), FloatingPointError, "is not finite"),
}


@pytest.mark.parametrize("kind", BAD)
@every
def test_a_bad_gradient_in_the_last_place_changes_nothing(make, kind) -> None:
    gradient, error, message = BAD[kind]
    for place in (0, 1):  # a matrix, a vector
        params = parameters()
        last = [params.pop(1 - place)]
        optimizer = make([{"params": params}, {"params": [*last]}], weight_decay=0.5)
        for had in (0, 2):  # also before its first step
            steps(optimizer, 0, had)
            before = snapshot(optimizer)
            set_gradients(params_of(optimizer), 5)
            last[0].grad = gradient(last[0])
            shape = str(tuple(last[0].shape)).replace("(", r"\(").replace(")", r"\)")
            with pytest.raises(error, match=f"parameter 0, shape {shape}, {message}"):
                optimizer.step()
            assert_same(snapshot(optimizer), before)
        steps(optimizer, 5, 6)  # and it can go on


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float32, 3e38), (torch.float16, 6e4), (torch.bfloat16, 3e38), (torch.float64, 1e300)],
    ids=str,
)
@every
def test_a_sum_that_overflows_is_no_false_alarm(make, dtype: torch.dtype, value: float) -> None:
    p = nn.Parameter(torch.ones(3, dtype=dtype))
    p.grad = torch.full((3,), value, dtype=dtype)
    assert not math.isfinite(p.grad.sum().float())
    make([p], lr=0.1).step()
    assert p.isfinite().all()
