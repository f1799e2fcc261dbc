"""One step of beam search: which candidates go on, from which beams, and which have ended."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer
from lm_from_scratch.generation.beam_search import Hypothesis, _Rules

Step = tuple[Tensor, Tensor, Tensor, Tensor]


def beam_step(scores: Tensor, log_probs: Tensor, stop: int) -> Step:
    """The package's own rules, which judge the candidates of one prompt."""
    n, V = log_probs.shape[1:]
    rules = _Rules(n, 1000, 1.0, False, {stop})
    totals = (scores[:, :, None] + log_probs).tolist()
    rows = []
    for own, total in zip(scores.tolist(), totals):
        beams = [Hypothesis((), score, score, 0, "kept") for score in own]
        judged = rules.judge(beams, total, [list(range(V))] * n)
        kept = [h for h in judged if h.fate == "kept"]
        ended = [-math.inf] * n
        for h in judged:
            if h.fate == "finished":
                ended[h.parent] = h.log_probability
        rows.append(
            ([h.log_probability for h in kept], [h.parent for h in kept],
             [h.tokens[-1] for h in kept], ended)
        )  # fmt: skip
    best, parents, tokens, ended_scores = zip(*rows)
    return (
        torch.tensor(best, dtype=scores.dtype),
        torch.tensor(parents),
        torch.tensor(tokens),
        torch.tensor(ended_scores, dtype=scores.dtype),
    )


def step(function: Callable[..., Any], scores: Tensor, log_probs: Tensor, stop: int) -> Any:
    """One step; its results by name."""
    result = function(scores, log_probs, stop)
    if result is None:
        return None
    if not isinstance(result, tuple) or len(result) != 4:
        raise TypeError("the result must be a tuple of four: scores, parents, tokens, ended")
    return dict(zip(("parents", "tokens", "scores", "ended"), (*result[1:3], result[0], result[3])))


def candidates(g: Generator, B: int, n: int, V: int) -> tuple[Tensor, Tensor]:
    """Scores and log-probabilities. All totals of a prompt lie at least 0.01 apart, and every beam
    has some of the best."""
    totals = torch.rand(B, n * V, generator=g).argsort(dim=-1).argsort(dim=-1)
    steps = 0.01 + 0.02 * torch.rand(B, n * V, generator=g)
    totals = -1 - steps.cumsum(-1).gather(-1, totals).view(B, n, V)
    scores = -torch.rand(B, n, generator=g).cumsum(-1)
    return scores, totals - scores[:, :, None]


def placed(scores: Tensor, order: list[tuple[int, int]], V: int) -> Tensor:
    """Log-probabilities for one prompt: the candidates (beam, token) of `order` are the best, in
    this order; all others are far below."""
    n = scores.shape[1]
    totals = -50 - 0.1 * torch.arange(n * V).float().view(1, n, V)
    for rank, (beam, token) in enumerate(order):
        totals[0, beam, token] = -5 - 0.3 * rank
    return totals - scores[:, :, None]


def falling(g: Generator, n: int) -> Tensor:
    """Scores of beams, best first, as a step leaves them."""
    return -1 - torch.rand(1, n, generator=g).cumsum(-1)


def two_beams(g: Generator) -> Call:
    """Five tokens; the best candidate continues beam 1, the second beam 0."""
    scores = falling(g, 2)
    a, b = (int(i) for i in 2 + torch.randperm(3, generator=g)[:2])
    return call(scores, placed(scores, [(1, a), (0, b), (0, a)], 5), integer(g, 0, 2))


def one_parent(g: Generator) -> Call:
    scores = falling(g, 3)
    a, b, c, d, stop = torch.randperm(5, generator=g).tolist()
    order = [(1, a), (1, b), (1, c), (0, d), (2, a)]
    return call(scores, placed(scores, order, 5), stop)


def several_prompts(g: Generator) -> Call:
    scores, log_probs = candidates(g, 3, 4, 11)
    stop = integer(g, 1, 10)
    log_probs[:, :, stop] = -60 - torch.rand(3, 4, generator=g)
    return call(scores, log_probs, stop)


def first_step(g: Generator) -> Call:
    """Only beam 0 exists. The others hold likelier tokens, which do not count."""
    _, log_probs = candidates(g, 1, 3, 7)
    scores = torch.tensor([[0.0, -math.inf, -math.inf]])
    log_probs[:, 1:] = log_probs[:, 1:] / 10
    stop = integer(g, 0, 7)
    log_probs[:, :, stop] = -70.0
    return call(scores, log_probs, stop)


def one_ends(g: Generator) -> Call:
    """The second best of three ends, after another token of its beam: its place goes to the
    fourth."""
    scores = falling(g, 3)
    a, b, c, d, e, stop = torch.randperm(6, generator=g).tolist()
    if stop == 5:
        a, stop = stop, a
    order = [(2, a), (2, stop), (1, b), (0, c), (2, d), (1, e)]
    return call(scores, placed(scores, order, 6), stop)


def too_late(g: Generator) -> Call:
    """The fourth and sixth of three end: too late, although they come before kept ones or right
    after them."""
    scores = falling(g, 3)
    a, b, c, d, e, stop = torch.randperm(6, generator=g).tolist()
    order = [(1, stop), (0, a), (2, b), (0, stop), (1, c), (2, stop), (2, d), (0, e)]
    log_probs = placed(scores, order, 6)
    beams = [torch.randperm(3, generator=g) for _ in range(3)]  # three prompts, each at a level
    log_probs = torch.cat([log_probs[:, order] for order in beams])
    scores = torch.cat([scores[:, order] for order in beams])
    return call(scores - torch.tensor([[9.0], [0.0], [4.0]]), log_probs, stop)


def all_end(g: Generator) -> Call:
    scores = falling(g, 3)
    a, b, c, d, stop = torch.randperm(5, generator=g).tolist()
    order = [(2, stop), (0, stop), (1, stop), (1, a), (2, b), (0, c), (0, d)]
    return call(scores, placed(scores, order, 5), stop)


def more_beams_than_tokens(g: Generator) -> Call:
    scores, log_probs = candidates(g, 1, 5, 3)
    stop = integer(g, 0, 3)
    log_probs[:, :, stop] = -60 - torch.rand(1, 5, generator=g)
    return call(scores, log_probs, stop)


def long_texts(g: Generator) -> Call:
    scores, log_probs = candidates(g, 1, 3, 6)
    stop = integer(g, 0, 6)
    log_probs[:, :, stop] = -60 - torch.rand(1, 3, generator=g)
    return call(scores.double() - 1000, log_probs.double(), stop)


# ------------------------------------------------------------------------------- wrong answers

TOTALS = "totals = scores[:, :, None] + log_probs"
NO_STOP = "totals[:, :, stop] = -math.inf"
LATE = "ends < nth_best"
BEST = "best, place = totals.flatten(1).topk(n)"
RETURN = "return best, place // V, place % V, ended"
PLAIN, ONE, PROMPTS = ("two beams, no end", "all of the best continue one beam", "several prompts")
FIRST, WIDE = "the first step: one beam exists", "more beams than tokens"
LONG = "long texts, scores near -1000"
END, LATER, ALL = ("one of the best ends", "ends that come too late", "all of the best end")

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the scores of the beams are left out", {TOTALS: "totals = log_probs.clone()"}, PLAIN),
    ("each beam goes on with its own best token",
     {BEST: "best, tokens = totals.max(-1)",
      RETURN: "return best, torch.arange(n).expand_as(tokens).clone(), tokens, ended"}, ONE),
    ("parent and token exchanged", {RETURN: "return best, place % V, place // V, ended"}, PLAIN),
    ("the place is divided by n, not by V",
     {RETURN: "return best, place // n, place % n, ended"}, PLAIN),
    ("the beams come first in the order of candidates, not the tokens",
     {BEST: "best, place = totals.transpose(1, 2).flatten(1).topk(n)",
      RETURN: "return best, place // V, place % V, ended"}, PLAIN),
    ("the n best of each beam are looked for, where there may be fewer",
     {"topk(n)\n": "topk(n)\n    totals.topk(n)\n"}, WIDE),
    ("the best of the whole batch, not of each prompt",
     {BEST: "best, place = totals.flatten().topk(scores.numel())\n"
      "    best, place = best.view(-1, n), place.view(-1, n) % (n * V)"}, PROMPTS),
    ("parents count through the whole batch",
     {RETURN: "return best, place // V + n * torch.arange(len(best))[:, None], place % V, ended"},
     PROMPTS),
    ("a candidate with the stop token goes on", {"totals[:, :, stop] = -math.inf": ""}, END),
    ("the stop token is taken for a token like any other",
     {"totals[:, :, stop] = -math.inf": "", "ends < nth_best": "ends < math.inf"}, END),
    ("-100 instead of minus infinity",
     {"totals[:, :, stop] = -math.inf": "totals[:, :, stop] = -100.0"}, LONG),
    ("the place of an end stays empty",
     {NO_STOP: "",
      RETURN: RETURN.replace("best", "best.masked_fill(place % V == stop, -math.inf)")}, END),
    ("every stop token is an end, however unlikely", {LATE: "ends < -math.inf"}, PLAIN),
    ("an end is compared with what goes on, not with all candidates",
     {"nth_best = totals":
      "nth_best = totals.where(torch.arange(V) != stop, torch.tensor(-math.inf))"}, LATER),
    ("an end may be among the 2n best", {"topk(n).values": "topk(2 * n).values"}, LATER),
    ("at most one candidate may end",
     {"    totals[:, :, stop] =":
      "    ended[ended < ended.amax(1, keepdim=True)] = -math.inf\n    totals[:, :, stop] ="}, ALL),
    ("one limit for the ends of all prompts",
     {"    ended = ": "    nth_best = nth_best.amin(0)\n    ended = "}, LATER),
    ("the sums are float32", {TOTALS: "totals = (scores[:, :, None] + log_probs).float()"}, LONG),
    ("only beam 0 may end",
     {"    totals[:, :, stop] =": "    ended[:, 1:] = -math.inf\n    totals[:, :, stop] ="}, END),
    ("only the best of all may end", {"topk(n).values": "topk(1).values"}, END),
    ("the n-th best may not end", {LATE: "ends <= nth_best"}, ALL),
    ("ends are listed by score, not by beam",
     {RETURN: f"{RETURN}.sort(dim=-1, descending=True).values"}, END),
    ("ends go on, and are listed by rank, not by beam",
     {NO_STOP: "",
      RETURN: RETURN.replace("ended", "best.masked_fill(place % V != stop, -math.inf)")}, END),
    ("the log-probability alone of what has ended", {"ends = totals": "ends = log_probs"}, END),
    ("probabilities instead of logarithms",
     {TOTALS: "totals = scores.exp()[:, :, None] * log_probs.exp()",
      RETURN: "return best.log(), place // V, place % V, ended.log()", LATE: "ends < nth_best",
      "masked_fill(ends < nth_best, -math.inf)": "masked_fill(ends < nth_best, 0.0)",
      "totals[:, :, stop] = -math.inf": "totals[:, :, stop] = 0.0"}, LONG),
    ("the scores are subtracted", {TOTALS: TOTALS.replace("+", "-")}, PLAIN),
    ("the scores are multiplied", {TOTALS: TOTALS.replace("+", "*")}, PLAIN),
    ("the stop token is always the last of the vocabulary",
     {"    n, V = log_probs": "    stop = -1\n    n, V = log_probs"}, END),
    ("beams that do not exist have the score 0",
     {TOTALS: "scores = scores.where(scores > -math.inf, torch.tensor(0.0))\n    " + TOTALS},
     FIRST),
    ("the worst of the best comes first",
     {RETURN: RETURN.replace("best", "best.flip(1)").replace("place ", "place.flip(1) ")}, PLAIN),
    ("written into the caller's log_probs",
     {RETURN: f"log_probs += scores[:, :, None]\n    {RETURN}"}, PLAIN),
]  # fmt: skip

CASES = (
    Case(PLAIN, two_beams,
         "add the score of each beam to its log-probabilities; take one topk over all n V "
         "candidates; place = parent * V + token", points=2, use=step,
         teaching="the step without an end"),
    Case(ONE, one_parent,
         "the best candidates may all continue one beam: compare all of them, not beam by beam",
         points=2,
         teaching="the idea of the search: one beam may have all successors, another none",
         use=step),
    Case(PROMPTS, several_prompts,
         "flatten beams and tokens of each prompt, not the batch; parents count from 0 in each "
         "prompt", teaching="several prompts without an end", use=step),
    Case(FIRST, first_step,
         "minus infinity plus anything is minus infinity: no such candidate is among the best",
         use=step),
    Case(WIDE, more_beams_than_tokens,
         "with n > V a beam cannot have n continuations: ask for the n best of all n V", use=step),
    Case(END, one_ends, "a candidate with the stop token makes room for the next one that goes on",
         points=2, teaching="one end alone, before the rank matters", use=step),
    Case(LATER, too_late,
         "an end counts if it is among the n best of all candidates, before any is taken out",
         use=step),
    Case(ALL, all_end, "even if all n best end, n beams go on", use=step),
    Case(LONG, long_texts, "exp(-1000) is 0: stay with the logarithms", use=step),
)  # fmt: skip

EXERCISE = Exercise(
    name="beam_step", function="beam_step", page="6_generation/1_beam_search", minutes=30,
    difficulty=2,
    outcome="Write one step of beam search for a batch, so that parents, tokens and what has "
            "ended are right.",
    reference=beam_step, after=("top_p",), cases=CASES, wrong=planted(WRONG),
    hints=(
        "All candidates of a prompt are one list of n V numbers. What tells you the beam and the "
        "token of the number at place i?",
        "`totals = scores[:, :, None] + log_probs`, then `totals.flatten(1).topk(n)`. The parent "
        "is `place // V`, the token `place % V`.",
        "What ends is judged among all candidates, what goes on among those without the stop "
        "token. Both come from one tensor: which of the two has to be found first?",
    ),
)  # fmt: skip
