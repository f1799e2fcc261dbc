"""The gated delta rule: fade, ask, write the difference, read."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal
from lm_from_scratch.layers.delta_rule import recurrent_delta_rule, unit_length


def reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The package's recurrence."""
    return recurrent_delta_rule(q, k, v, g, beta, state)


def inputs(
    g: Generator,
    tokens: int = 5,
    widths: tuple[int, int] = (4, 4),
    gate: float | None = None,
    rate: float | None = None,
    empty: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Call:
    """Keys of length 1; a gate and a rate for all tokens, where they are given."""
    Dk, Dv = widths
    q, k = (unit_length(normal(g, 2, 3, tokens, Dk, dtype=dtype)) for _ in range(2))
    v, state = normal(g, 2, 3, tokens, Dv, dtype=dtype), normal(g, 2, 3, Dk, Dv, dtype=dtype)
    gates = -2 * torch.rand(2, 3, tokens, generator=g)
    beta = 0.1 + 0.8 * torch.rand(2, 3, tokens, generator=g)
    if gate is not None:
        gates = torch.full_like(gates, gate)
    if rate is not None:
        beta = torch.full_like(beta, rate)
    state = torch.zeros_like(state) if empty else state
    return call(*(x.to(dtype) for x in (q, k, v, gates, beta, state)))


def gated(g: Generator) -> Call:
    return inputs(g)


def overwritten(g: Generator) -> Call:
    """One key, written five times at full rate: the last value is what is read for it."""
    _, k, *rest = inputs(g, gate=0.0, rate=1.0, empty=True).args
    k = k[:, :, :1].repeat(1, 1, 5, 1)
    return call(k.clone(), k, *rest)


def forgets(g: Generator) -> Call:
    q, k, v, gates, beta, state = inputs(g).args
    gates[:, :, 1], gates[:, :, [0, 3]] = -120.0, -torch.inf
    return call(q, k, v, gates, beta, state * 1e9)  # exp(-20) of it would be seen


def double(g: Generator) -> Call:
    """Of more tokens than a chunk of 64 has, and not a multiple of it."""
    return inputs(g, tokens=150, dtype=torch.float64)


def in_pieces(function: Callable[..., Any], *tokens: Tensor) -> Any:
    """Two tokens, then one, then the rest, each piece with the state of the one before."""
    *parts, state = tokens
    results = []
    for piece in zip(*(x.split([2, 1, 2], dim=2) for x in parts), strict=True):
        y, state = function(*piece, state)
        results.append(y)
    return torch.cat(results, dim=2), state


# ------------------------------------------------------------------------------- wrong answers

ONE, PLAIN, GATED = "one token into an empty state", "no gate", "gates"
AGAIN, PIECES, LOST = "one key, written again and again", "a text in three pieces", "gates of -120"
MISSING = "v[:, :, t, None] - key.mT @ state"
WRITE = "state = state + key @ (rate[:, :, t] * missing)"
FADE = "state = decay[:, :, t] * state"
READ = "outputs.append(q[:, :, t, None] @ state)"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the value is added, as in linear attention", {MISSING: "v[:, :, t, None]"}, AGAIN),
    ("what the state says is asked before it fades",
     {FADE: f"missing = {MISSING}\n        {FADE}", f"        missing = {MISSING}  ": "        "},
     GATED),
    ("the gate is cut off at -20", {"decay = g.exp()": "decay = g.clamp(min=-20).exp()"}, LOST),
    ("the query asks, not the key",
     {MISSING: "v[:, :, t, None] - q[:, :, t, None] @ state"}, PLAIN),
    ("the difference has the wrong sign", {MISSING: "key.mT @ state - v[:, :, t, None]"}, ONE),
    ("a token reads before it writes",
     {f"{WRITE}\n        {READ}": f"{READ}\n        {WRITE}"}, ONE),
    ("there is no gate", {FADE: "state = state"}, GATED),
    ("the gate is used as it is, without the exponential", {"g.exp()": "g"}, GATED),
    ("the gate is taken for a sigmoid's", {"g.exp()": "g.sigmoid()"}, PLAIN),
    ("the gate is 1 + g, which is the exponential near 0 alone", {"g.exp()": "(1 + g)"}, GATED),
    ("what is written fades with the rest",
     {FADE: "state = state", READ: f"{FADE}\n        {READ}"}, GATED),
    ("beta is left out", {"rate[:, :, t] * missing": "missing"}, ONE),
    ("beta multiplies the value alone",
     {MISSING: "v[:, :, t, None] * rate[:, :, t] - key.mT @ state",
      "rate[:, :, t] * missing": "missing"}, PLAIN),
    ("beta multiplies what is asked, and the value is written whole",
     {MISSING: "v[:, :, t, None] - rate[:, :, t] * (key.mT @ state)",
      "rate[:, :, t] * missing": "missing"}, ONE),
    ("beta fades the state", {FADE: "state = decay[:, :, t] * (1 - rate[:, :, t]) * state"}, PLAIN),
    ("each token has the gate of the one before",
     {FADE: "state = decay[:, :, max(t - 1, 0)] * state"}, GATED),
    ("the state that comes in is ignored",
     {"decay = g.exp()": "state = torch.zeros_like(state)\n    decay = g.exp()"}, PIECES),
    ("the state that goes out is the one that came in",
     {"    outputs = []": "    first, outputs = state, []",
      "torch.cat(outputs, 2), state": "torch.cat(outputs, 2), first"}, ONE),
    ("keys are divided by their length's root",
     {"k[:, :, t, :, None]": "k[:, :, t, :, None] / k.shape[3] ** 0.5"}, ONE),
    ("queries are divided by the root of Dk",
     {"q[:, :, t, None] @ state": "q[:, :, t, None] / q.shape[3] ** 0.5 @ state"}, ONE),
    ("the state is transposed on its way out", {", 2), state": ", 2), state.mT"}, ONE),
    ("the state is changed in place", {FADE: "state *= decay[:, :, t]"}, GATED),
    ("float64 is computed in float32", {"g.exp()": "g.float().exp()"}, "150 tokens in float64"),
    ("tokens after the first 64 are left out",
     {"decay = g.exp()": "q = q[:, :, :64]\n    decay = g.exp()"}, "150 tokens in float64"),
    ("no gradient passes from token to token", {FADE: "state = decay[:, :, t] * state.detach()"},
     "gradients of all six"),
]  # fmt: skip

CASES = (
    Case(ONE, lambda g: inputs(g, tokens=1, empty=True),
         "an empty state says 0: beta times the outer product of key and value is written",
         points=2, teaching="one product that can be done by hand"),
    Case(PLAIN, lambda g: inputs(g, gate=0.0, empty=True),
         "with g = 0 nothing fades: ask with the key, write the difference, read with the query",
         points=3, teaching="the rule without its gate"),
    Case(AGAIN, overwritten,
         "beta = 1 and one key: each token reads its own value, and the old one is gone", points=2,
         teaching="what the correction is for"),
    Case(GATED, gated, "the state fades first, by exp(g); then it is asked", points=2,
         teaching="the order of the lines"),
    Case(PIECES, gated, "the second piece begins with the state of the first", use=in_pieces,
         points=2, teaching="a cache"),
    Case("values wider than keys", lambda g: inputs(g, widths=(3, 7)),
         "a state has Dk rows and Dv columns", teaching="a shape error says which axis is meant"),
    Case(LOST, forgets,
         "exp of minus infinity is 0, and 0 times the state is 0, however large it was"),
    Case("150 tokens in float64", double, "nothing becomes float32, and no token is left out"),
    Case("gradients of all six", gated, "nothing may be detached", gradient=True),
)  # fmt: skip

EXERCISE = Exercise(
    name="delta_rule", function="delta_rule", page="9_since_qwen2/6_delta_rule", minutes=30,
    difficulty=2,
    outcome="Write a layer whose memory is one matrix, and which can correct what it has stored.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Write it for one head and one token with plain matrices: `S` is (Dk, Dv), `k` (Dk,), `v` "
        "(Dv,).",
        "With `key` as a column, (Dk, 1), the state says `key.mT @ S`, a row of Dv numbers, and "
        "what is written is `key @ row`.",
        "The order of the text decides: what the state says is asked after it has faded, and read "
        "after it was written. All heads can do this at once, the tokens only one by one.",
    ),
)  # fmt: skip
