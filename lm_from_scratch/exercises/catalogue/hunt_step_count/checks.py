"""An AdamW that counts its steps for the whole group, and refuses a gradient half way through."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal
from lm_from_scratch.optim.adamw import AdamW

Grads = Sequence[Tensor | None]
State = dict[Any, Any]


def package_update(
    params: list[Tensor],
    grads: Grads,
    state: State,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """The package's optimizer, kept in the state; it holds parameters by identity."""
    optimizer = state.setdefault("optimizer", AdamW(params, lr, betas, eps, weight_decay))
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    optimizer.step()


def copied(params: Sequence[Tensor]) -> list[Tensor]:
    return [p.clone() for p in params]


def run(
    function: Callable[..., Any], params: list[Tensor], grads: list[Grads], **options: Any
) -> dict[str, Tensor]:
    """Several steps, one call each; the parameters after each."""
    now, state = copied(params), State()
    seen: dict[str, Tensor] = {}
    for step, row in enumerate(grads, start=1):
        function(list(now), list(row), state, **options)
        for i, p in enumerate(now):
            seen[f"parameter {i} after step {step}"] = p.clone()
    return seen


def last(
    function: Callable[..., Any], params: list[Tensor], grads: list[Grads], **options: Any
) -> dict[str, Tensor]:
    """What the last of several steps adds to each parameter."""
    now, state = copied(params), State()
    for row in grads[:-1]:
        function(list(now), list(row), state, **options)
    before = copied(now)
    function(list(now), list(grads[-1]), state, **options)
    pairs = enumerate(zip(now, before, strict=True))
    return {f"the move of parameter {i} in step {len(grads)}": b - a for i, (b, a) in pairs}


def sparse(shape: Sequence[int]) -> Tensor:
    return torch.zeros(*shape).to_sparse()


def caught(
    function: Callable[..., Any], params: list[Tensor], grads: list[Grads], **options: Any
) -> dict[str, Any]:
    """Two ordinary steps, then a refused one: what the parameters are before and after it."""
    now, state = copied(params), State()
    for row in grads:
        function(list(now), list(row), state, **options)
    seen: dict[str, Any] = {}
    for place in reversed(range(len(now))):
        row = [sparse(p.shape) if i == place else p.sign() for i, p in enumerate(params)]
        seen[f"a call with a sparse gradient at place {place}"] = refused(
            function, list(now), row, state, **options
        )
        for i, p in enumerate(now):
            seen[f"parameter {i} after the refused call (sparse at place {place})"] = p.clone()
    row = [None, sparse(params[1].shape), *(p.sign() for p in params[2:])]
    seen["a call with a sparse gradient after a missing one"] = refused(
        function, list(now), row, state, **options
    )
    return seen


def refused(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    try:
        function(*args, **options)
    except ValueError:
        return "raises ValueError"
    return "raises nothing"


def went_on(
    function: Callable[..., Any], params: list[Tensor], grads: list[Grads], **options: Any
) -> dict[str, Tensor]:
    """Steps of which the second is refused: the others go on as if it had not been there.

    The parameters are set back to what they were, so that only what the state keeps is seen.
    """
    now, state = copied(params), State()
    seen: dict[str, Tensor] = {}
    for step, row in enumerate(grads, start=1):
        before = copied(now)
        if step == 2:
            refused(function, list(now), [*row[:-1], sparse(params[-1].shape)], state, **options)
            for p, old in zip(now, before, strict=True):
                p.copy_(old)
        function(list(now), list(row), state, **options)
        for i, p in enumerate(now):
            seen[f"parameter {i} after step {step}"] = p.clone()
    return seen


# ------------------------------------------------------------------------------------- arguments


def shapes(g: Generator) -> list[Tensor]:
    return [normal(g, 2, 3), normal(g, 4)]


def rows(g: Generator, count: int, params: list[Tensor]) -> list[list[Tensor | None]]:
    return [[normal(g, *p.shape) for p in params] for _ in range(count)]


def options(lr: float, weight_decay: float = 0.01, eps: float = 1e-8) -> dict[str, Any]:
    return dict(lr=lr, betas=(0.9, 0.999), eps=eps, weight_decay=weight_decay)


def all_of_them(g: Generator) -> Call:
    params = shapes(g)
    grads = rows(g, 3, params)
    grads[2][1] = torch.zeros_like(params[1])  # zeros are a gradient: decay and means go on
    return call(params, grads, **options(0.05, weight_decay=0.3) | {"betas": (0.8, 0.95)})


def near_eps(g: Generator) -> Call:
    grads = [[normal(g, 2, 3) * 1e-6, normal(g, 4) * 1e-6] for _ in range(2)]
    return call(shapes(g), grads, **options(0.1, eps=1e-6))


def without(g: Generator) -> Call:
    params = [normal(g, 2, 3) + 3, normal(g, 4) + 3]
    grads = rows(g, 3, params)
    for row in grads:
        row[1] = None
    return call(params, grads, **options(0.05, weight_decay=0.3))


def late(g: Generator) -> Call:
    signs = torch.where(normal(g, 4) < 0, -1.0, 1.0)
    params = [normal(g, 2, 3), torch.zeros(4)]
    grads = rows(g, 10, params)
    for row in grads[:-1]:
        row[1] = None
    grads[-1][1] = signs
    return call(params, grads, **options(0.01, weight_decay=0.0))


def some(g: Generator) -> Call:
    params = shapes(g)
    grads = rows(g, 6, params)
    for row in grads[1:3]:
        row[0] = None
    for row in grads[:2] + grads[4:5]:
        row[1] = None
    return call(params, grads, **options(0.05))


def alike(g: Generator) -> Call:
    double = partial(normal, g, 5, dtype=torch.float64)
    params = [double()] * 3
    grads: list[list[Tensor | None]] = [[double() for _ in params] for _ in range(5)]
    for row in grads[:3]:
        row[0] = row[2] = None
    return call(params, grads, **options(0.05))


def two(g: Generator) -> Call:
    params = [*shapes(g), normal(g, 3)]
    return call(params, rows(g, 2, params), **options(0.05))


def five(g: Generator) -> Call:
    params = [*shapes(g), normal(g, 3)]
    return call(params, rows(g, 3, params), **options(0.05))


# ------------------------------------------------------------------------------- wrong answers

CHECK = (
    "    if any(grad is not None and grad.is_sparse for grad in grads):\n"
    '        raise ValueError("sparse gradients are not supported")\n'
)
NONE = "        if grad is None:\n            continue\n"
INSIDE = (
    "        if grad.is_sparse:\n"
    '            raise ValueError("sparse gradients are not supported")\n'
)
ALL = "params, grads, state, lr, betas, eps, weight_decay"
COUNT = 'state[i]["step"] += 1'
POWERS = ('betas[0] ** state[i]["step"]', 'betas[1] ** state[i]["step"]')
GROUP = '    state["t"] = state.get("t", 0) + 1\n'


def counted(by: str) -> dict[str, str]:
    """The solution with another count in both corrections."""
    return {POWERS[0]: f"betas[0] ** ({by})", POWERS[1]: f"betas[1] ** ({by})"}


LATE, SPARSE = "a first gradient in step 10", "a sparse gradient, refused before anything moves"
PLAIN, GAPS = "every parameter in every step", "gradients with gaps"
NEVER, ALIKE = "a parameter that never has a gradient", "parameters that look alike, in float64"
AFTERWARDS = "the steps after a refused one"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the code as found", {CHECK: f"    return update_group_as_found({ALL})\n"}, LATE),
    ("the refusal is repaired, the count is still that of the group",
     {CHECK: CHECK + GROUP} | counted('state["t"]'), LATE),
    ("the count is repaired, a sparse gradient is still found half way",
     {CHECK: "", NONE: NONE + INSIDE}, SPARSE),
    ("a gradient of zeros is taken for none",
     {NONE: "        if grad is None or not grad.any():\n            continue\n"}, PLAIN),
    ("sparse gradients are looked for up to the first missing one",
     {CHECK: "    for grad in grads:\n        if grad is None:\n            break\n" + INSIDE},
     SPARSE),
    ("always the same betas", {CHECK: CHECK + "    betas = (0.9, 0.999)\n"}, PLAIN),
    ("one count for all, raised once for each parameter",
     {COUNT: 'state["t"] = state.get("t", 0) + 1'} | counted('state["t"]'), LATE),
    ("a count for each parameter, raised also without a gradient",
     {NONE: "        state[-1 - i] = state.get(-1 - i, 0) + 1\n" + NONE}
     | counted("state[-1 - i]"), LATE, "such a count is that of the group"),
    ("the count is that of the group, less the steps before the first gradient",
     {CHECK: CHECK + GROUP, '{"step": 0,': '{"step": 0, "from": state["t"] - 1,'}
     | counted('state["t"] - state[i]["from"]'), GAPS),
    ("the count of the group begins again when a parameter is new",
     {CHECK: CHECK + GROUP, "zeros = torch": 'state["t"] = 1\n            zeros = torch'}
     | counted('state["t"]'), GAPS),
    ("only the first mean is corrected by the parameter's own count",
     {CHECK: CHECK + GROUP, POWERS[1]: 'betas[1] ** state["t"]'}, LATE),
    ("only the mean of the squares is corrected by the parameter's own count",
     {CHECK: CHECK + GROUP, POWERS[0]: 'betas[0] ** state["t"]'}, LATE),
    ("no bias correction at all", counted("1e9"), PLAIN),
    ("a missing gradient is taken for zeros",
     {NONE: "        grad = torch.zeros_like(p) if grad is None else grad\n"}, NEVER),
    ("a parameter without a gradient decays",
     {NONE: "        if grad is None:\n            p.mul_(1 - lr * weight_decay)\n"
      "            continue\n"}, NEVER),
    ("a parameter starts again after a step without a gradient",
     {NONE: NONE.replace("continue", "state.pop(i, None)\n            continue")}, GAPS),
    ("the state is kept by shape, so that parameters of one shape share it",
     {"        grad = grads[i]\n": "        grad, i = grads[i], tuple(p.shape)\n"}, ALIKE),
    ("a new tensor in the list, instead of the parameter",
     {"p.mul_(1 - lr * weight_decay).sub_(lr * direction)":
      "params[i] = p * (1 - lr * weight_decay) - lr * direction"}, PLAIN),
    ("the means are kept in float32",
     {"zeros = torch.zeros_like(p)": "zeros = torch.zeros_like(p, dtype=torch.float32)"}, ALIKE),
    ("a sparse gradient is made dense and used",
     {CHECK: "    grads = [g.to_dense() if g is not None else g for g in grads]\n"}, SPARSE),
    ("a sparse gradient is passed over, the others are used",
     {CHECK: "", NONE: NONE.replace("is None", "is None or grad.is_sparse")}, SPARSE),
    ("a sparse gradient ends the call without a word",
     {CHECK: CHECK.replace(
      'raise ValueError("sparse gradients are not supported")', "return"
      )}, SPARSE),
    ("the counts are raised before the refusal", {
         CHECK: "    for i in range(len(params)):\n"
         "        if grads[i] is not None:\n"
         "            state[-1 - i] = state.get(-1 - i, 0) + 1\n" + CHECK
     }
     | counted("state[-1 - i]"), AFTERWARDS),
    ("the parameters are set back after a refusal, the means are not",
     {CHECK: "    old = [p.clone() for p in params]\n", NONE: NONE
      + INSIDE.replace(
      "            raise",
      "            for q, before in zip(params, old):\n"
      "                q.copy_(before)\n"
      "            raise",
      )}, AFTERWARDS),
    ("eps before the bias correction",
     {"((v / correction2).sqrt() + eps)": "(v.sqrt() + eps) * correction2**0.5"},
     "gradients near 1e-6, eps 1e-6"),
]  # fmt: skip

CASES = (
    Case(PLAIN, all_of_them,
         "this was right before: compare what you changed with the code as found", use=run,
         guard=True),
    Case("gradients near 1e-6, eps 1e-6", near_eps,
         "eps is added after the bias correction, as in the code as found", use=run, guard=True,
         teaching="a repair must not move eps"),
    Case(NEVER, without, "None is not a gradient of zeros: no decay, no step", use=run, guard=True,
         teaching="a repair must not let it decay"),
    Case(LATE, late,
         "with its first gradient, whenever that comes, a parameter moves by lr: 0.01. What is "
         "divided by 1 - beta**10 here?", points=3, use=last,
         teaching="the number of the first report"),
    Case(GAPS, some,
         "the count grows with the gradients of this parameter, neither with the calls nor with "
         "those of its neighbours", points=2, use=run),
    Case(ALIKE, alike,
         "three parameters of one shape and one value are still three; the means have the dtype "
         "of the parameter", use=run),
    Case(SPARSE, two,
         "look at all gradients before the first parameter is touched", points=2, use=caught),
    Case(AFTERWARDS, five, "a refused call must not leave anything in the state, not even a count",
         points=2, use=went_on),
)  # fmt: skip

EXERCISE = Exercise(
    name="hunt_step_count", function="update_group", page="7_optimizers/1_adamw", minutes=25,
    difficulty=2,
    outcome="Fix an optimizer so that each parameter has its own step count and a refused call "
            "changes nothing.",
    after=("adamw_step",), hunt="L8, L9", reference=package_update, cases=CASES,
    wrong=planted(WRONG),
    hints=(
        "Take the first report: lr is 0.01, the gradient is 1, the means begin at 0. Work out by "
        "hand what step 1 and what step 10 divide by.",
        "There are two defects. One is a number that all parameters share. The other is the order "
        "of two things that the loop does.",
        "How many gradients has this parameter's mean seen? That number belongs beside the mean. "
        "And an error found halfway comes too late for what was written before it. The page on "
        "AdamW has the first defect under L8 in its bug museum.",
    ),
)  # fmt: skip
