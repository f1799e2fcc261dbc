"""Bug hunt: a choice of keys that equal scores leave to the layout of memory."""

import torch
from torch import Generator, Tensor

from lm_from_scratch.attention.indexer import choose, restrict
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer, integers, normal


def reference(scores: Tensor, query_positions: Tensor, key_positions: Tensor, k: int) -> Tensor:
    """The package's choice, as a mask."""
    seen = Visibility(query_positions[None], key_positions[None])
    return restrict(seen, choose(scores[None], seen, k)).mask[0, 0]


def tied(g: Generator, T: int, S: int) -> Tensor:
    """Scores of which about two thirds are exactly 0."""
    return normal(g, T, S).mul(2).round().clamp(min=0.0) * (integers(g, 0, 2, T, S))


def late_queries(g: Generator) -> Call:
    S = integer(g, 36, 44)
    return call(tied(g, 12, S), torch.arange(S - 12, S), torch.arange(S), 8)


def early_queries(g: Generator) -> Call:
    S = integer(g, 12, 16)
    return call(tied(g, S, S), torch.arange(S), torch.arange(S), 8)


def ring(g: Generator) -> Call:
    """At positions that 16 bits do not count."""
    order = 40_000 + torch.randperm(30, generator=g)
    return call(tied(g, 8, 30), torch.arange(40_022, 40_030), order, 5)


def left_padding(g: Generator) -> Call:
    pads = integer(g, 3, 6)
    positions = torch.cat([torch.full((pads,), -1), torch.arange(9)])
    return call(tied(g, len(positions), len(positions)), positions, positions, 4)


def below_zero(g: Generator) -> Call:
    scores = -5.0 - tied(g, 10, 24)
    return call(scores, torch.arange(14, 24), torch.arange(24), 6)


def hair_apart(g: Generator) -> Call:
    """The earlier the key, the higher the score: by one step of float32, or by 0.00002."""
    start = 0.5 + 0.4 * torch.rand(1, generator=g)
    closest = [start]
    for _ in range(15):
        closest.insert(0, torch.nextafter(closest[0], torch.ones(1)))
    close = start + 2e-5 * torch.arange(16).flip(0)
    scores = torch.stack([torch.cat(closest), close]).repeat(2, 1)
    return call(scores, torch.arange(12, 16), torch.arange(16), 5)


def far_from_zero(g: Generator) -> Call:
    scores = 1e8 + 1e6 * tied(g, 8, 20)
    return call(scores, torch.arange(12, 20), torch.arange(20), 6)


def one_key(g: Generator) -> Call:
    return call(tied(g, 8, 20) * 0, torch.arange(12, 20), torch.randperm(20, generator=g), 1)


def all_different(g: Generator) -> Call:
    scores = torch.randperm(8 * 20, generator=g).float().view(8, 20)
    return call(scores, torch.arange(12, 20), torch.arange(20), 6)


# ------------------------------------------------------------------------------- wrong answers

LATE, EARLY = "equal scores", "queries that see fewer keys than k"
RING, HAIR = "keys in another order", "scores a hair apart"
SORT = "ordered.sort(dim=-1, descending=True, stable=True).indices[:, :k]"
SCATTER = "torch.zeros_like(visible).scatter(-1, latest[best], True)"
FOUND = "    return choose_keys_as_found(scores, query_positions, key_positions, k)\n"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the code as found", {"    visible = (": f"{FOUND}    visible = ("}, LATE),
    ("equal scores have a rule, but hidden keys still fill places that are left",
     {"return chosen & visible": "return chosen"}, EARLY),
    ("hidden keys are gone, but equal scores are left to topk",
     {SORT: "ordered.topk(min(k, scores.shape[1])).indices"}, LATE),
    ("the earliest of equal scores wins", {"argsort(descending=True)": "argsort()"}, LATE),
    ("the last column wins, not the latest position",
     {"key_positions.argsort(descending=True)": "torch.arange(len(key_positions)).flip(0)"}, RING),
    ("the first column wins",
     {"key_positions.argsort(descending=True)": "torch.arange(len(key_positions))"}, LATE),
    ("the best keys are taken first, and the mask comes after",
     {"scores.masked_fill(~visible, -torch.inf)[:, latest]": "scores[:, latest]"}, EARLY),
    ("hidden scores become 0", {"-torch.inf": "0.0"}, EARLY),
    ("hidden scores become -1", {"-torch.inf": "-1.0"}, "scores below zero"),
    ("padding is taken for a key",
     {"(key_positions >= 0) & (key_positions <= query_positions[:, None])":
          "key_positions <= query_positions[:, None]"}, "left padding"),
    ("position 0 is taken for padding", {"key_positions >= 0": "key_positions > 0"}, EARLY),
    ("a query does not see its own key",
     {"key_positions <= query_positions": "key_positions < query_positions"}, EARLY),
    ("places in memory are compared, not positions",
     {"(key_positions <= query_positions[:, None])":
          "torch.ones(scores.shape).tril(scores.shape[1] - len(scores)).bool()"}, RING),
    ("later keys get a small bonus",
     {"ordered = scores": "ordered = (scores + 1e-6 * key_positions)"}, HAIR),
    ("scores are rounded before they are compared",
     {"ordered = scores": "ordered = scores.round(decimals=3)"}, HAIR),
    ("all keys that are equal to the last one chosen are read",
     {SCATTER: "scores >= scores.gather(1, latest[best]).amin(-1, keepdim=True)"}, LATE),
    ("keys that are equal to the last one chosen are left out",
     {SCATTER: "scores > scores.gather(1, latest[best]).amin(-1, keepdim=True)"}, LATE),
    ("one key too few", {"[:, :k]": "[:, : k - 1]"}, LATE),
    ("one key too many", {"[:, :k]": "[:, : k + 1]"}, LATE),
    ("the lowest scores win",
     {"sort(dim=-1, descending=True": "sort(dim=-1, descending=False"}, LATE),
    ("the columns of the sorted scores are returned", {"latest[best]": "best"}, LATE),
    ("True where a key is not read", {"chosen & visible": "~(chosen & visible)"}, LATE),
    ("the scores of the caller are overwritten", {"scores.masked_fill(": "scores.masked_fill_("},
     LATE),
]  # fmt: skip

CASES = (
    Case(LATE, late_queries,
         "most scores are 0, and more keys are equal than there are places: the latest win",
         points=2, teaching="the first mistake of the story, alone"),
    Case(EARLY, early_queries,
         "the first query sees one key: it reads this one, and no hidden key in its company",
         points=2, teaching="the second mistake, in the shape in which somebody counted"),
    Case(RING, ring, "the latest position wins, in whatever column it lies", points=2,
         teaching="a cache that goes round: the rule is on positions"),
    Case("left padding", left_padding, "a key at -1 is never read, and a query at -1 reads none"),
    Case("scores below zero", below_zero, "a hidden key must lose against every score"),
    Case(HAIR, hair_apart, "scores that differ, however little, are not equal"),
    Case("scores far from zero", far_from_zero, "a small number added to 1e8 is lost",
         teaching="ties that no bonus can break"),
    Case("one key each", one_key, "all scores are equal: each query reads the latest key",
         teaching="nothing but ties: the rule by itself"),
    Case("k larger than the text",
         lambda g: call(tied(g, 7, 7), torch.arange(7), torch.arange(7), 20),
         "each query reads all that it sees", guard=True,
         teaching="topk with a k that is too large raises an error"),
    Case("no two scores equal", all_different,
         "without ties, and with enough keys, the code as found was right", guard=True,
         teaching="the code as found passes it: this is why random scores show nothing"),
)  # fmt: skip

EXERCISE = Exercise(
    name="hunt_topk_ties", function="choose_keys", page="9_since_qwen2/7_sparse_attention",
    minutes=20, difficulty=2,
    outcome="Tell a leak of the future from a choice that depends on the length of a row.",
    reference=reference, after=("visibility",), hunt="M76", cases=CASES, wrong=planted(WRONG),
    hints=(
        "Print what `topk` gives for a row of zeros, of length 24 and of length 64. What does its "
        "documentation say of equal elements?",
        "There are two mistakes. One: equal scores need a rule that depends on positions alone. "
        "Two: where a query sees fewer keys than k, the places that are left must stay empty.",
        "A stable sort keeps the order in which equal scores come. So the order before the "
        "sort decides between them: which key should win? Then the columns are those of the "
        "reordered keys.",
    ),
)  # fmt: skip
