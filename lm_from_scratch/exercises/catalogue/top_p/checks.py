"""Top-k and top-p: which tokens stay, at the border too, and in which order the two are applied."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer, normal
from lm_from_scratch.generation.sampling import Sampler


def cut_tail(logits: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """The package's own chain of steps, with the others off."""
    nothing = torch.zeros_like(logits, dtype=torch.bool)
    return Sampler(top_k=top_k, top_p=top_p).logits(logits, nothing)


def kept_of_equals(
    function: Callable[..., Any], logits: Tensor, top_k: int = 0, top_p: float = 1.0
) -> Any:
    """How many tokens stay, and their logits in order: which of equal ones stay is left open."""
    result = function(logits, top_k=top_k, top_p=top_p)
    if not isinstance(result, Tensor) or result.shape != logits.shape:
        return result
    kept = result > -math.inf
    return {
        "whether each logit is as before or minus infinity": bool((result == logits)[kept].all()),
        "the number of tokens kept in each row": kept.sum(dim=-1),
        "the result, each row sorted": result.sort(dim=-1, descending=True).values,
    }


def small_shares(function: Callable[..., Any], logits: Tensor, shares: list[float]) -> Any:
    """What each top_p gives, or that it is refused."""
    results = {}
    for p in shares:
        try:
            results[f"top_p={p}"] = function(logits.clone(), top_p=p)
        except ValueError:
            results[f"top_p={p}"] = "raises ValueError"
    return results


def with_and_without(function: Callable[..., Any], logits: Tensor, top_k: int, top_p: float) -> Any:
    return {
        f"top_k={top_k}, top_p={top_p}": function(logits, top_k=top_k, top_p=top_p),
        f"top_k={top_k}": function(logits, top_k=top_k),
    }


def spread(g: Generator, B: int, V: int) -> Tensor:
    """Logits whose probabilities fall slowly, in any order; no sum of them is a round number."""
    ladder = torch.linspace(2, -2, V) + 0.02 * torch.rand(B, V, generator=g)
    order = torch.rand(B, V, generator=g).argsort(dim=-1)
    return ladder.gather(-1, order)


def nucleus(g: Generator) -> Call:
    """A ladder that is rotated: its most likely token is neither first nor last."""
    ladder = torch.linspace(2, -2, 9) + 0.02 * torch.rand(1, 9, generator=g)
    return call(ladder.roll(integer(g, 2, 8), dims=1), top_p=0.8)


def sharp_and_flat(g: Generator) -> Call:
    """The same p keeps few tokens of a sharp row and many of a flat one."""
    logits = spread(g, 4, 11) * torch.tensor([2.2, 0.1, 1.0, 0.5])[:, None]
    return call(logits, top_p=0.7)


def border(g: Generator) -> Call:
    """Eight equal tokens: four of them have the probability 0.5 exactly, also in float32."""
    logits = torch.full((1, 13), -800.0)
    logits[0, torch.randperm(13, generator=g)[:8]] = float(normal(g))
    return call(logits, top_p=0.5)


def equal_at_k(g: Generator) -> Call:
    logits = torch.tensor(
        [[3.0, 2.0, 2.0, 2.0, 1.0, 0.0, -1.0], [5.0, 4.0, 3.0, 1.0, 1.0, 0.0, 0.0]]
    )
    order = torch.rand(2, 7, generator=g).argsort(dim=-1)
    return call(logits.gather(-1, order), top_k=3)


def forbidden(g: Generator) -> Call:
    logits = spread(g, 2, 9)
    logits[0, torch.randperm(9, generator=g)[:5]] = -math.inf
    return call(logits, top_k=20, top_p=0.6)


def extreme(g: Generator) -> Call:
    """The same row near 1000 and near -1000."""
    return call(spread(g, 1, 10) + torch.tensor([[1000.0], [-1000.0]]), top_p=0.75)


def half(g: Generator) -> Call:
    """512 equal tokens: sums of 1/512 above 1/2 need nine bits, and bfloat16 has eight."""
    return call(torch.full((2, 512), float(normal(g)), dtype=torch.bfloat16), top_p=0.748)


def off(g: Generator) -> Call:
    """The third token is so unlikely that the sum before it is 1, rounded."""
    logits = spread(g, 1, 6) * 100
    return call(logits, top_k=3)


# ------------------------------------------------------------------------------- wrong answers

CHECK = 'if top_p <= 0.0:\n        raise ValueError(f"top_p is {top_p}, and must be above 0")'
GIVEN = {CHECK: f"given = logits\n    {CHECK}"}
BEFORE = "before >= top_p"
SUM = "probability.cumsum(dim=1) - probability"
SCATTER = "removed.scatter(1, order, before >= top_p)"
K_FILL = "logits.masked_fill(logits < smallest, -math.inf)"
P_FILL = "logits.masked_fill(removed, -math.inf)"
K, P, ROWS = "top-k alone", "top-p alone, one row", "rows that differ, sharp and flat"
BOTH, BORDER = "top-k, then top-p", "a probability of exactly p"
EQUAL = "several tokens equal to the k-th"
TINY, FORBIDDEN = "a p of 0.001, of 0 and below", "forbidden tokens, and a k above V"
EXTREME, HALF = "logits near 1000 and -1000", "bfloat16, many equal tokens"
OFF = "top-p off, an unlikely token"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the token that reaches p is cut, too",
     {SUM: "probability.cumsum(dim=1).index_fill(1, torch.tensor(0), 0.0)",
      BEFORE: "before > top_p"}, P),
    ("the mask stays in sorted order", {SCATTER: "before >= top_p"}, P),
    ("one token more than it takes to reach p",
     {BEFORE: "torch.cat([before[:, :1], before[:, :-1]], dim=1) >= top_p"}, P),
    ("one token too many where the sum is exactly p", {BEFORE: "before > top_p"}, BORDER),
    ("all tokens that equal the last one kept by top-p stay",
     {P_FILL: "logits.masked_fill(logits < logits.masked_fill(removed, math.inf)"
      ".amin(-1, keepdim=True), -math.inf)"}, BORDER),
    ("top-p counts with the tokens that top-k has cut",
     GIVEN | {"ordered, order = logits": "ordered, order = given"}, BOTH),
    ("the mask is gathered by the order, not scattered",
     {SCATTER: "(before >= top_p).gather(-1, order)"}, P),
    ("sorted from the least likely", {"descending=True": "descending=False"}, P),
    ("tokens less likely than p are cut",
     {SUM: "1 - probability", BEFORE: "before > 1 - top_p"}, P),
    ("tokens less likely than 1 - p are cut",
     {SUM: "-probability", BEFORE: "before > top_p - 1"}, P),
    ("top-k is left out where top-p is given", {"if top_k:": "if top_k and top_p == 1.0:"}, BOTH),
    ("the result stays sorted",
     {P_FILL: "ordered.to(logits.dtype).masked_fill(before >= top_p, -math.inf)"}, P),
    ("as many tokens in every row as in the first",
     {SCATTER: SCATTER.replace("before >= top_p", "(before >= top_p)[:1].expand_as(order)")}, ROWS),
    ("one token more than k", {"k = min(top_k,": "k = min(top_k + 1,"}, K),
    ("the k-th token itself is cut", {"logits < smallest": "logits <= smallest"}, K),
    ("exactly k tokens stay, whichever come first of equal ones",
     {K_FILL: "torch.full_like(logits, -math.inf).scatter(-1, *TOP)".replace(
      "*TOP", "logits.topk(k).indices, logits.topk(k).values"
      )}, EQUAL),
    ("one limit for the whole batch", {"[:, -1:]": "[:, -1:].min()"}, K),
    ("the set of row 0 in every row",
     {SCATTER: "removed.scatter(1, order, before >= top_p)[:1].expand_as(logits)"}, ROWS),
    ("what is cut gets the logit 0",
     {K_FILL: "logits.masked_fill(logits < smallest, 0.0)",
      P_FILL: "logits.masked_fill(removed, 0.0)"}, K),
    ("a finite number instead of minus infinity",
     {K_FILL: "logits.masked_fill(logits < smallest, -1e9)",
      P_FILL: "logits.masked_fill(removed, -1e9)"}, K),
    ("the result is probabilities", {"    return logits\n": "    return logits.softmax(-1)\n"}, K),
    ("the result is log-probabilities",
     {"    return logits\n": "    return logits.log_softmax(-1)\n"}, K),
    ("a k above V is refused", {"min(top_k, logits.shape[1])": "top_k"}, FORBIDDEN),
    ("a k above V keeps all but one", {"logits.shape[1])": "logits.shape[1] - 1)"}, FORBIDDEN),
    ("a top_p of 0 is taken as off", {CHECK: "if top_p <= 0.0:\n        top_p = 1.0"}, TINY),
    ("a top_p of 0 cuts every token", {CHECK: ""}, TINY),
    ("always at least two tokens",
     {BEFORE: "(before >= top_p) & (torch.arange(logits.shape[1]) > 1)"}, TINY),
    ("exp without the maximum subtracted",
     {"ordered.softmax(dim=1)": "ordered.exp() / ordered.exp().sum(dim=1, keepdim=True)"}, EXTREME),
    ("top-p cuts at 1.0, where it should be off", {"if top_p < 1.0": "if top_p <= 1.0"}, OFF),
    ("the sums are in half precision", {"logits.float()": "logits"}, HALF),
    ("the result is float32", {"    return logits\n": "    return logits.float()\n"}, HALF),
    ("a k of 0 keeps one token", {"if top_k:": "top_k = max(top_k, 1)\n    if top_k:"}, P),
    ("written into the caller's logits",
     GIVEN | {"return logits": "given[logits == -math.inf] = -math.inf\n    return logits"}, K),
]  # fmt: skip

CASES = (
    Case(K, lambda g: call(spread(g, 3, 8) + torch.tensor([[0.0], [5.0], [-5.0]]), top_k=3),
         "the k-th largest logit of a row is the limit: what is below it is cut", points=2),
    Case(P, nucleus,
         "sort, sum up the probabilities, and keep a token while the sum before it is below p",
         points=2, teaching="top-p in its plain form"),
    Case(ROWS, sharp_and_flat, "each row has its own order, and its own number of tokens",
         teaching="rows that differ, with top-p alone"),
    Case(BOTH, lambda g: call(spread(g, 1, 12), top_k=4, top_p=0.8),
         "after top-k the probabilities of what is left sum to 1 again"),
    Case(BORDER, border, "eight equal tokens and p = 0.5: four of them reach p, so four are kept",
         points=2, use=kept_of_equals),
    Case(EQUAL, equal_at_k, "compare with the k-th largest value: what equals it stays, too"),
    Case(TINY, lambda g: call(spread(g, 1, 7), shares=[0.001, 0.0, -0.5]),
         "before the most likely token the sum is 0, which is below any p above 0; a p of 0 or "
         "less is refused by ValueError", use=small_shares),
    Case(FORBIDDEN, forbidden,
         "topk refuses a k above V; a forbidden token has the probability 0 and stays forbidden",
         use=with_and_without),
    Case(EXTREME, extreme,
         "exp(1000) is infinite and exp(-1000) is 0: softmax subtracts the maximum first; and "
         "only minus infinity is below every logit"),
    Case(HALF, half, "383 of 512 equal tokens reach 0.748, and no fewer: sum up after .float()",
         use=kept_of_equals),
    Case(OFF, off, "top_p=1.0 is off: it cuts nothing, though the sum is rounded to 1 early"),
)  # fmt: skip

EXERCISE = Exercise(
    name="top_p", function="cut_tail", page="1_gpt2/5_sampling", minutes=25, difficulty=2,
    outcome="Write top-k and top-p so that they hold at the border, with ties, with forbidden "
            "tokens and in half precision.",
    reference=cut_tail, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Top-k needs one number for each row. Top-p needs the tokens in order: sort, then sum up.",
        "Of the sorted probabilities, `cumsum - probability` is the sum *before* each token. It is "
        "cut where that sum has reached p. The mask is then in sorted order.",
        "`sort` also returns `order`, the place of each sorted token. `scatter` writes along it, "
        "so it takes a mask from sorted order back to the tokens' own places.",
    ),
)  # fmt: skip
