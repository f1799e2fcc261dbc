"""Speculative decoding: which drafts are kept, and what is drawn where the first one falls."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers
from lm_from_scratch.generation.speculative import accept

Result = tuple[Tensor, Tensor]


def accept_drafts(p: Tensor, q: Tensor, draft: Tensor, u: Tensor) -> Result:
    """The package's own rule."""
    return accept(p, q, draft, u)


def judged(function: Callable[..., Any], p: Tensor, q: Tensor, draft: Tensor, u: Tensor) -> Any:
    """The two results by name."""
    result = function(p, q, draft, u)
    if result is None:
        return None
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError("the result must be a tuple of two: how many are accepted, and the token")
    return {"the number of accepted drafts": result[0], "the token": result[1]}


def some(g: Generator, *shape: int) -> Tensor:
    """Probabilities in float64, none of them 0."""
    return torch.randn(shape, generator=g, dtype=torch.float64).mul(1.5).softmax(-1)


def uniform(g: Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=g, dtype=torch.float64)


def one_draft(g: Generator) -> Call:
    """Half of the rows hold a draft that q prefers, half one that p prefers by much."""
    B, V = 60, 6
    p, q = some(g, B, 2, V), some(g, B, 1, V)
    ratio = p[:, 0] / q[:, 0]
    draft = torch.where(torch.arange(B) % 2 == 1, ratio.argmax(-1), ratio.argsort(-1)[:, 1])
    return call(p, q, draft[:, None], uniform(g, B, 2))


def all_stand(g: Generator) -> Call:
    """p and q are equal at the drafts: nothing is rejected, and p alone counts after them."""
    B, K, V = 24, 3, 5
    p = some(g, B, K + 1, V)
    p[:, K] = p[:, K].flip(-1)
    draft = integers(g, 0, V, B, K)
    return call(p, p[:, :K].clone(), draft, uniform(g, B, K + 1))


def a_gap(g: Generator) -> Call:
    """The draft at one place is impossible, those after it are certain to be accepted."""
    B, K, V = 30, 4, 7
    p, q, draft = some(g, B, K + 1, V), some(g, B, K, V), integers(g, 0, V, B, K)
    rows, bad = torch.arange(B), torch.arange(B) % (K - 1)
    one = F.one_hot(draft, V).double()
    p[:, :K] += 9 * one
    p[rows, bad] *= 1 - one[rows, bad]
    p = p / p.sum(-1, keepdim=True)
    return call(p.float(), q.float(), draft, uniform(g, B, K + 1).float())


def rejected(g: Generator) -> Call:
    """Every draft is impossible, and another token must come."""
    B, K, V = 80, 2, 6
    p, q, draft = some(g, B, K + 1, V), some(g, B, K, V), integers(g, 0, V, B, K)
    p[:, :K] *= 1 - F.one_hot(draft, V)
    return call(p / p.sum(-1, keepdim=True), q, draft, uniform(g, B, K + 1))


def fewer(g: Generator) -> Call:
    """Rows with 0 to 3 drafts that are all accepted; q behind them has no meaning."""
    B, K, V = 40, 3, 5
    p, draft = some(g, B, K + 1, V), integers(g, 0, V, B, K)
    q = p[:, :K].clone()
    gone = torch.arange(K) >= (torch.arange(B) % (K + 1))[:, None]
    q[gone] = 2 * some(g, int(gone.sum()), V)
    return call(p, q, draft.masked_fill(gone, -1), uniform(g, B, K + 1))


def no_draft(g: Generator) -> Call:
    B, V = 20, 6
    return call(some(g, B, 1, V), some(g, B, 0, V), integers(g, 0, V, B, 0), uniform(g, B, 1))


def greedy(g: Generator) -> Call:
    """Distributions of 0 and 1 over many tokens, and numbers u of which some are 0."""
    B, K, V = 6, 1, 40_000
    best, draft = integers(g, 32_768, V, B, K + 1), integers(g, 32_768, V, B, K)
    draft[::2] = best[::2, :K]
    draft[1::2] = (best[1::2, :K] + 1) % V
    u = uniform(g, B, K + 1)
    u[::3] = 0.0
    return call(F.one_hot(best, V).double(), F.one_hot(draft, V).double(), draft, u)


def nothing_left(g: Generator) -> Call:
    """In half of the rows p is q but for a factor just below 1, and u is above that factor."""
    B, V = 24, 5
    p = some(g, B, 2, V)
    q = p[:, :1].clone()
    q[::2] = some(g, B // 2, 1, V)
    p[:, :1] *= 1 - 1e-12
    u = uniform(g, B, 2)
    u[:, 1] = 1 - 1e-15
    draft = integers(g, 0, V, B, 1)
    draft[::2] = (q - p[:, :1])[::2].argmax(-1)  # these are rejected, and something is left over
    return call(p, q, draft, u)


def unlikely(g: Generator) -> Call:
    """Drafts of a probability near 1e-8, and as little is left over for another token."""
    B, V = 40, 5
    p = some(g, B, 2, V)
    q = p[:, :1].clone()
    others = (1 - 2.1e-8) / p[:, :1, 0::2].sum(-1, keepdim=True)
    p[:, :1], q = p[:, :1] * others, q * others
    p[:, 0, 1], q[:, 0, 1] = 1e-8, 2e-8
    p[:, 0, 3], q[:, 0, 3] = 1.1e-8, 1e-9
    u = uniform(g, B, 2)
    u[:6, 1] = 0.5 + 1e-11 * torch.tensor([-1.0, 1.0] * 3).double()  # beside p(x) / q(x)
    return call(p, q, torch.ones(B, 1, dtype=torch.long), u)


# ------------------------------------------------------------------------------- wrong answers

ACCEPTED = "accepted = real & (u[:, 1:] * q_x < p_x)"
REST = "rest = (p - q).clamp(min=0)"
FALLBACK = "rest = torch.where(rest.any(1, keepdim=True), rest, p)"
PLACE = "p, q = p[rows, n], q[rows, n]"
DRAWN = "pick(rest, u[:, 0])"

ONE, REJECTED, STAND = ("one draft in each row", "the first draft rejected", "all drafts accepted")
GAP, FEWER, NONE = "a good draft after a rejected one", "rows with fewer drafts", "no draft at all"
GREEDY, UNLIKELY = "probabilities of 0 and 1, and u = 0", "an unlikely draft, p(x) = 1e-8"
ROUNDING = "nothing left over"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the replacement is drawn from p", {REST: "rest = p"}, REJECTED),
    ("every draft is accepted", {ACCEPTED: "accepted = real"}, ONE),
    ("accepted drafts after a rejected one are counted", {".cumprod(1)": ""}, GAP),
    ("only drafts that p prefers are accepted, without a coin",
     {ACCEPTED: "accepted = real & (q_x <= p_x)"}, ONE),
    ("accepted with probability p(x), q left out",
     {ACCEPTED: "accepted = real & (u[:, 1:] < p_x)"}, ONE),
    ("the quotient turned round: q(x) / p(x)",
     {ACCEPTED: "accepted = real & (u[:, 1:] * p_x < q_x)"}, ONE),
    ("-1 is taken for token 0, and its q is subtracted",
     {"real = draft": "draft = draft.clamp(min=0)\n    real = draft"}, FEWER),
    ("after full acceptance the token is drawn from p at the last draft",
     {PLACE: "p, q = p[rows, n - (n == draft.shape[1]).long()], q[rows, n]"}, STAND),
    ("the replacement is drawn from q", {REST: "rest = q"}, REJECTED),
    ("a rejected draft is the token all the same",
     {DRAWN: f"{DRAWN}.where((d := F.pad(draft, (0, 1), value=-1)[rows, n]) < 0, d)"}, REJECTED),
    ("the number that draws the token also judges the drafts", {"u[:, 1:]": "u[:, :1]"}, ONE),
    ("the replacement is drawn from max(0, q - p)",
     {REST: "rest = (q - p).clamp(min=0)",
      FALLBACK: "rest = torch.where((q > 0).any(1, keepdim=True), rest, p)"}, REJECTED),
    ("the replacement is drawn from |p - q|", {REST: "rest = (p - q).abs()"}, REJECTED),
    ("the replacement is drawn from p without the rejected token",
     {REST:
      "rest = p * (F.pad(draft, (0, 1), value=-1)[rows, n][:, None] != torch.arange(p.shape[1]))"},
     REJECTED),
    ("the last number of u draws the token, the others judge",
     {"u[:, 1:] * q_x": "u[:, :-1] * q_x", DRAWN: "pick(rest, u[:, -1])"}, ONE),
    ("the number that judged a draft also draws its replacement",
     {DRAWN: "pick(rest, u[rows, (n + 1).clamp(max=draft.shape[1])])"}, REJECTED),
    ("after full acceptance the last q is subtracted again",
     {PLACE: "p, q = p[rows, n], q[rows, n.clamp(max=max(draft.shape[1] - 1, 0))]"}, STAND),
    ("the last place gives the token, wherever the first rejection is",
     {PLACE: "p, q = p[:, -1], q[:, -1]"}, REJECTED),
    ("the token comes from one place too late",
     {PLACE: "late = (n + 1).clamp(max=draft.shape[1])\n    p, q = p[rows, late], q[rows, late]"},
     REJECTED),
    ("the distribution of row 0 for the token of every row",
     {PLACE: "p, q = p[0, n], q[0, n]"}, REJECTED),
    ("-1 is judged as if token 0 were drafted", {"accepted = real &": "accepted ="}, FEWER),
    ("q is subtracted where there is no draft",
     {"q.masked_fill(~real[:, :, None], 0)": "q"}, FEWER),
    ("a draft with p(x) = 0 is accepted at u = 0", {"* q_x < p_x": "* q_x <= p_x"}, GREEDY),
    ("the likeliest token instead of a draw", {DRAWN: "rest.argmax(1)"}, STAND),
    ("a constant is added to q(x)", {"* q_x <": "* (q_x + 1e-6) <"}, UNLIKELY),
    ("little left over is taken for nothing",
     {FALLBACK: "rest = torch.where(rest.sum(1, keepdim=True) > 1e-6, rest, p)"}, UNLIKELY),
    ("after all drafts of a short row the token is drawn from p at the last place",
     {PLACE: "last = n.masked_fill(n == real.sum(1), draft.shape[1])\n"
             "    p, q = p[rows, last], q[rows, n]"}, FEWER),
    ("if nothing is left over in one row, all rows are drawn from p",
     {FALLBACK: "rest = rest if rest.any(1).all() else p"}, ROUNDING),
    ("no help where nothing is left over", {FALLBACK: ""}, ROUNDING),
    ("the number of the first rejected draft counts from 1", {"return n,": "return n + 1,"}, ONE),
    ("K of at least 1 is taken for granted",
     {"real = draft >= 0": "real = draft >= 0\n    draft[:, 0]"}, NONE),
]  # fmt: skip

CASES = (
    Case(ONE, one_draft,
         "u[:, 1] judges the draft, u[:, 0] draws the token; after a rejection it is drawn from "
         "max(0, p - q), after an acceptance from the next p", points=2, use=judged,
         teaching="one draft, with both ends of the rule"),
    Case(REJECTED, rejected,
         "the replacement is drawn from max(0, p - q) at the place of the rejected draft", points=2,
         teaching="the replacement alone", use=judged),
    Case(STAND, all_stand,
         "after K accepted drafts the token comes from p[:, K], and there is no q there", points=2,
         teaching="full acceptance alone", use=judged),
    Case(GAP, a_gap, "count up to the first rejection: cumprod of 1 1 0 1 is 1 1 0 0", points=2,
         use=judged),
    Case(FEWER, fewer,
         "-1 is no draft: it is not accepted, and at its place nothing is subtracted from p",
         use=judged),
    Case(NONE, no_draft, "with K = 0 the token is drawn from p[:, 0]", use=judged),
    Case(GREEDY, greedy, "0 < 0 is False: with p(x) = 0 a draft is rejected, also at u = 0",
         use=judged),
    Case(UNLIKELY, unlikely,
         "any p above q is left over, however little; u, p and q are compared as they are",
         use=judged),
    Case(ROUNDING, nothing_left, "if all weights are 0, take those of p", use=judged),
)  # fmt: skip

EXERCISE = Exercise(
    name="speculative", function="accept_drafts", page="6_generation/2_speculative_decoding",
    minutes=40, difficulty=3,
    outcome="Write the acceptance rule of speculative decoding for a batch, so that every token "
            "has exactly the model's distribution.",
    reference=accept_drafts, after=("top_p",), cases=CASES, wrong=planted(WRONG),
    hints=(
        "Three steps: judge all drafts at once, count up to the first rejection, draw one token at "
        "that place. Which distribution belongs to the place in each case?",
        "`gather` takes p and q at the drafts (clamp -1 to 0 first, and mask it). "
        "`accepted.cumprod(1).sum(1)` is the number n of drafts that are kept.",
        "Where there is no draft, nothing is to be subtracted: with q = 0, max(0, p - q) is p. So "
        "one formula can serve a rejection, full acceptance and a short row.",
    ),
)  # fmt: skip
