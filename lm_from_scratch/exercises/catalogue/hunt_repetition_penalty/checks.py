"""Bug hunt: a repetition penalty that rewards, and that takes its tokens from another row."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers, normal
from lm_from_scratch.generation.sampling import apply_repetition_penalty


def penalise(logits: Tensor, idx: Tensor, penalty: float) -> Tensor:
    """The package's own penalty, which takes a mask of what has occurred."""
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, idx, True)
    return apply_repetition_penalty(logits, seen, penalty)


def never_likelier(
    function: Callable[..., Any], logits: Tensor, idx: Tensor, penalty: float
) -> Any:
    """Whether each token that has occurred is now at most as likely as before."""
    result = function(logits, idx, penalty)
    if not isinstance(result, Tensor):
        return result
    before = logits.double().softmax(-1).gather(1, idx)
    after = result.double().softmax(-1).gather(1, idx)
    return after <= before + 1e-9


def sizes(g: Generator, *shape: int) -> Tensor:
    """Numbers between 0.5 and 3.5, none near another's quotient with the penalty."""
    return 0.5 + 3 * torch.rand(shape, generator=g)


def own_tokens(g: Generator, B: int, T: int, V: int) -> Tensor:
    """(B, T): no token is in two rows or twice in one."""
    return torch.randperm(V, generator=g)[: B * T].view(B, T)


def many(g: Generator) -> Call:
    """More tokens than 16 bits count; the last two are among those that have occurred."""
    idx = torch.cat([own_tokens(g, 1, 68, 32_998), torch.tensor([[32_999, 32_998]])], dim=1)
    return call(sizes(g, 1, 33_000), idx, 1.3)


def repeated(g: Generator) -> Call:
    idx = own_tokens(g, 1, 4, 8)
    return call(sizes(g, 1, 8), torch.cat([idx, idx[:, :1], idx[:, :2]], dim=1), 1.5)


def forbidden(g: Generator) -> Call:
    logits, idx = sizes(g, 1, 10), torch.randperm(10, generator=g)[None]
    logits[0, idx[0, :1]] = -math.inf  # it has occurred
    logits[0, idx[0, -2:]] = -math.inf  # these have not
    return call(logits, idx[:, :4], 1.4)


def negative(g: Generator) -> Call:
    logits = sizes(g, 1, 7)
    idx = own_tokens(g, 1, 3, 7)
    logits[0, idx[0, :2]] *= -1
    return call(logits, idx, 2.0)


def rows(g: Generator) -> Call:
    """Token 0 is in row 1: it is no padding."""
    idx = own_tokens(g, 3, 4, 17)
    idx[idx == 0] = int(idx[1, 2])
    idx[1, 2] = 0
    return call(sizes(g, 3, 17), idx, 1.5)


def both(g: Generator) -> Call:
    """The first token of each row is likely and the second unlikely; in row 0 it is reversed."""
    idx = own_tokens(g, 4, 3, 19)
    logits = sizes(g, 4, 19) * integers(g, 0, 2, 4, 19).mul(2).sub(1)
    for row, (first, second) in enumerate(idx[:, :2].tolist()):
        for where, sign in ((0, -1), (row, 1)):
            logits[where, first] = sign * logits[where, first].abs()
            logits[where, second] = -sign * logits[where, second].abs()
    return call(logits, idx, 1.7)


def reward(g: Generator) -> Call:
    logits, idx, _ = both(g).args
    return call(logits, idx, 0.6)


def half(g: Generator) -> Call:
    logits, idx, _ = both(g).args
    return call(logits.to(torch.bfloat16), idx, 1.25)


# ------------------------------------------------------------------------------- wrong answers

SEEN = "seen = torch"
TOKENS = ".scatter(1, idx, True)"
BENT = "torch.where(logits > 0, logits / penalty, logits * penalty)"
RESULT = "torch.where(seen, penalised, logits)"
FIRST = "one row, positive logits"
FORBIDDEN, TWICE = "a forbidden token", "a token that occurs several times"
LONG = "70 tokens of a vocabulary of 33000"
NEGATIVE, ROWS = "negative logits", "several rows, each with its own tokens"
BOTH = "several rows, logits of both signs"
LAW, REWARD, HALF = "never more likely than before", "a penalty below 1", "bfloat16"

BACK = "return torch.where(seen, penalised, logits)"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the code as found",
     {SEEN: f"return penalise_as_found(logits, idx, penalty)\n    {SEEN}"}, BOTH),
    ("each row has its own tokens now, but a negative logit is still divided",
     {BENT: "logits / penalty"}, NEGATIVE),
    ("the sign counts now, but the tokens are still those of row 0",
     {TOKENS: ".scatter(1, idx[:1].expand_as(idx), True)"}, ROWS),
    ("the tokens of all rows are bent in every row",
     {TOKENS: ".scatter(1, idx.flatten().expand(len(idx), -1), True)"}, ROWS),
    ("positive logits are multiplied, negative ones divided", {"> 0": "< 0"}, FIRST),
    ("negative logits stay as they are", {"logits * penalty": "logits"}, NEGATIVE),
    ("the sign of a negative logit is lost",
     {"logits * penalty": "logits.abs() / penalty"}, NEGATIVE),
    ("every logit is multiplied", {BENT: "logits * penalty"}, FIRST),
    ("bent once for each occurrence",
     {BACK: "for row, tokens in zip(logits := logits.clone(), idx):\n"
      "        for token in tokens:\n"
      "            row[token] *= 1 / penalty if row[token] > 0 else penalty\n    return logits"},
     TWICE),
    ("one sign for the whole row", {"logits > 0": "(logits > 0).all(-1, keepdim=True)"}, NEGATIVE),
    ("one sign for a token in all rows",
     {"logits > 0": "(logits[:1] > 0).expand_as(logits)"}, BOTH),
    ("the penalty is subtracted", {BENT: "logits - penalty"}, FIRST),
    ("the probability is divided, not the logit",
     {BENT: "logits - torch.tensor(penalty).log().item()"}, FIRST),
    ("all logits are moved above 0 first",
     {BENT: "(logits - logits.amin(-1, keepdim=True)) / penalty + logits.amin(-1, keepdim=True)"},
     FIRST),
    ("the tokens that have not occurred are bent", {"where(seen": "where(~seen"}, FIRST),
    ("every token of the vocabulary is bent", {RESULT: "penalised"}, FIRST),
    ("only the last token of each row is bent", {"(1, idx,": "(1, idx[:, -1:],"}, FIRST),
    ("only the newest 64 tokens of each row are bent", {"(1, idx,": "(1, idx[:, -64:],"}, LONG),
    ("the last token of each row is not bent", {"(1, idx,": "(1, idx[:, :-1],"}, FIRST),
    ("token 0 is taken for padding",
     {"    penalised =": "    seen[:, 0] = False\n    penalised ="}, ROWS),
    ("log-probabilities are bent, not logits",
     {SEEN: f"logits = logits.log_softmax(1)\n    {SEEN}"}, FIRST),
    ("a penalty below 1 is taken for 1",
     {SEEN: f"penalty = max(penalty, 1.0)\n    {SEEN}"}, REWARD),
    ("the first token of each row is not bent", {"(1, idx,": "(1, idx[:, 1:],"}, FIRST),
    ("the smaller of quotient and product, whatever the penalty",
     {BENT: "torch.minimum(logits / penalty, logits * penalty)"}, REWARD),
    ("a sum with a mask of zeros and ones", {RESULT: "seen * penalised + ~seen * logits"},
     FORBIDDEN, "its fault is NaN, and the report says so"),
    ("the result is float32", {RESULT: f"{RESULT}.float()"}, HALF),
    ("written into the caller's logits", {BACK: f"return logits.copy_({BACK[7:]})"}, FIRST),
]  # fmt: skip

CASES = (
    Case(FIRST, lambda g: call(sizes(g, 1, 9), own_tokens(g, 1, 3, 9), 1.3),
         "the logit of a token that has occurred is divided by the penalty; others stay",
         guard=True, teaching="what the code as found does right"),
    Case(TWICE, repeated, "a token that occurs three times is bent once, not three times",
         guard=True),
    Case(FORBIDDEN, forbidden,
         "0 times infinity is NaN: choose with torch.where, do not multiply with a mask",
         guard=True),
    Case(LONG, many,
         "all tokens of the row are bent, however many there are", guard=True),
    Case(NEGATIVE, negative,
         "-1.65 / 2 is -0.825, which is larger: what makes a negative number smaller?", points=3,
         teaching="the first fault alone"),
    Case(ROWS, rows, "row 2 may only be bent at the tokens idx[2]", points=3,
         teaching="the second fault alone"),
    Case(BOTH, both, "the sign is that of each logit, and the tokens are those of each row",
         points=2, teaching="both faults at once: half a repair fails here, too"),
    Case(LAW, lambda g: call(normal(g, 40, 11, scale=3), integers(g, 0, 11, 40, 1), 1.3),
         "this is what a penalty above 1 is for: compare the softmax before and after",
         use=never_likelier,
         teaching="the purpose as a law, which a test can state without knowing the formula"),
    Case(REWARD, reward, "ask for the sign of the logit, not which of two numbers is smaller"),
    Case(HALF, half, "the result has the dtype of the logits"),
)  # fmt: skip

EXERCISE = Exercise(
    name="hunt_repetition_penalty", function="penalise", page="1_gpt2/5_sampling", minutes=20,
    difficulty=2,
    outcome="Find out why a repetition penalty makes tokens likelier and reaches the wrong rows, "
            "and fix both without breaking what works.",
    reference=penalise, hunt="G9, G10", cases=CASES, wrong=planted(WRONG),
    hints=(
        "Compute the story by hand: which way does -1.65 move when it is divided by 2? Then read "
        "which part of `idx` the loop looks at, and which part of `logits` it writes to.",
        "A positive logit is divided, a negative one multiplied: "
        "`torch.where(logits > 0, ..., ...)`. For the rows, build a mask of shape (B, V) that is "
        "True where a token is in its row.",
        "`scatter` along the last axis sets a mask of all rows at once; a token that is set twice "
        "is set once. Choose with the mask, do not multiply. The first fault is G9 in the bug "
        "museum of the page: the formula of the CTRL paper, taken literally. The second is G10: "
        "the loop read row 0 and wrote into all rows.",
    ),
)  # fmt: skip
