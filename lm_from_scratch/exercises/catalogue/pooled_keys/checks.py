"""Entries of a compressed cache: whose softmax, which blocks, and who may read them."""

import torch
from torch import Generator, Tensor

from lm_from_scratch.attention.pooling import blocks_of, completes, pool
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer, normal


def reference(values: Tensor, gates: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The package's own blocks, its pooling in float32, and its one rule for the mask."""
    B, T, _ = values.shape
    places = torch.arange(T).repeat(B, 1)
    blocks = blocks_of(completes(places, None, m), T // m, places, None, m)
    work = torch.promote_types(values.dtype, torch.float32)
    entries = pool(values.to(work), gates.to(work), blocks, m).to(values.dtype)
    return entries, Visibility(places[:1], blocks.ends[:1]).mask[0, 0]


def given(g: Generator, T: int, m: int, dtype: torch.dtype = torch.float32, D: int = 3) -> Call:
    return call(normal(g, 2, T, D, dtype=dtype), normal(g, 2, T, D, scale=1.5, dtype=dtype), m)


def ragged(g: Generator) -> Call:
    m = integer(g, 3, 6)
    return given(g, 3 * m + integer(g, 1, m), m)


def large(g: Generator) -> Call:
    """Gates at heights of their own in each block, which a softmax does not see."""
    values, gates = normal(g, 2, 12, 3), normal(g, 2, 12, 3)
    heights = torch.tensor([200.0, -200.0, 90.0]).repeat_interleave(4)[:, None]
    return call(values, gates + heights, 4)


def hidden(g: Generator) -> Call:
    values, gates = normal(g, 2, 12, 3), normal(g, 2, 12, 3)
    out = torch.rand(2, 12, 3, generator=g) < 0.4
    out[:, ::4] = False
    return call(values, gates.masked_fill(out, -torch.inf), 4)


def short(g: Generator) -> Call:
    m = integer(g, 4, 8)
    return given(g, m - 1, m)


# ------------------------------------------------------------------------------- wrong answers

TWO, RAGGED, BRAIN, LARGE = "two blocks of 3", "a block that waits", "bfloat16", "large gates"
HIDDEN, SHORT, ALONE = "gates of minus infinity", "no block is complete", "blocks of one token"
GRADIENTS = "gradients"

N, WORK = "T // m", "torch.promote_types(values.dtype, torch.float32)"
MIX = "(z.softmax(dim=2) * c).sum(dim=2).to(values.dtype)"
LAST, SEEN = "torch.arange(N) * m + m - 1", "last <= torch.arange(T)[:, None]"
CUT, GATES = "values[:, : N * m]", "gates[:, : N * m]"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("an entry is read from the first token of its block on", {LAST: "torch.arange(N) * m"}, TWO),
    ("an entry is read only after its last token", {SEEN: "last < torch.arange(T)[:, None]"}, TWO),
    ("an entry is read one token before its block is complete",
     {LAST: "torch.arange(N) * m + m - 2"}, TWO),
    ("every query reads every entry", {SEEN: "torch.ones(T, N, dtype=torch.bool)"}, TWO),
    ("the mask has entries for rows", {SEEN: f"({SEEN}).mT"}, TWO),
    ("True where an entry is hidden", {SEEN: "last > torch.arange(T)[:, None]"}, TWO),
    ("an entry is read by its own block alone",
     {SEEN: "torch.arange(N) == torch.arange(T)[:, None] // m"}, TWO),
    ("a plain mean, without the gates", {MIX: "(c + 0 * z).mean(dim=2).to(values.dtype)"}, TWO),
    ("one weight for all features", {"z.softmax(dim=2)": "z.mean(3, keepdim=True).softmax(dim=2)"},
     TWO),
    ("the softmax is over the features", {"z.softmax(dim=2)": "z.softmax(dim=3)"}, TWO),
    ("the softmax is over the blocks", {"z.softmax(dim=2)": "z.softmax(dim=1)"}, TWO),
    ("gates pass through a sigmoid, and do not sum to 1", {"z.softmax(dim=2)": "z.sigmoid()"}, TWO),
    ("the softmax is over the whole text",
     {"z.softmax(dim=2)": "gates.to(work).softmax(dim=1)[:, : N * m].unflatten(1, (N, m))"}, TWO),
    ("values and gates are exchanged", {MIX: "(c.softmax(dim=2) * z).sum(dim=2).to(values.dtype)"},
     TWO),
    ("a mean of the weighted values, not their sum", {"* c).sum(dim=2)": "* c).mean(dim=2)"}, TWO),
    ("a block is every N-th token",
     {"c = values[:, : N * m].to(work).unflatten(1, (N, m))":
      "c = values[:, : N * m].to(work).unflatten(1, (m, N)).transpose(1, 2)",
      "z = gates[:, : N * m].to(work).unflatten(1, (N, m))":
      "z = gates[:, : N * m].to(work).unflatten(1, (m, N)).transpose(1, 2)"}, TWO),
    ("blocks are counted from the end of the text",
     {CUT: "values[:, T - N * m :]", GATES: "gates[:, T - N * m :]"}, RAGGED),
    ("a block that is not complete is padded with zeros",
     {f"N = {N}": "N = -(-T // m)\n    rest = (0, 0, 0, N * m - T)\n"
      "    values, gates = (torch.nn.functional.pad(x, rest) for x in (values, gates))"}, RAGGED),
    ("the last block is dropped, complete or not", {f"N = {N}": "N = max((T - 1) // m, 0)"}, TWO),
    ("a text of whole blocks is taken for granted",
     {CUT: "values", GATES: "gates"}, RAGGED),
    ("a text without a complete block is refused",
     {f"N = {N}": f"N = {N}\n    if N == 0:\n        raise ValueError(T)"}, SHORT),
    ("there is always one entry", {f"N = {N}": f"N = max({N}, 1)\n    m = min(m, T)"}, SHORT),
    ("exponentials without subtracting the largest gate",
     {"z.softmax(dim=2)": "(z.exp() / z.exp().sum(2, keepdim=True))"}, LARGE,
     "a result of NaN is never named"),
    ("the largest gate of all is subtracted, and other blocks vanish",
     {"z.softmax(dim=2)": "((z - z.max()).exp() / (z - z.max()).exp().sum(2, keepdim=True))"},
     LARGE, "a result of NaN is never named"),
    ("a small number is added to the sum of the exponentials",
     {"z.softmax(dim=2)": "((z - z.amax((1, 2), keepdim=True)).exp() / (1e-6 + "
      "(z - z.amax((1, 2), keepdim=True)).exp().sum(2, keepdim=True)))"}, LARGE),
    ("minus infinity becomes a gate of 0",
     {"z.softmax(dim=2)": "z.nan_to_num(neginf=0.0).softmax(dim=2)"}, HIDDEN),
    ("a token that takes no part in one feature takes none in any",
     {"z.softmax(dim=2)": "z.masked_fill(z.isinf().any(3, keepdim=True), -1e9).softmax(dim=2)"},
     HIDDEN),
    ("all is computed in half precision", {WORK: "values.dtype"}, BRAIN),
    ("weights are rounded before they are used",
     {"z.softmax(dim=2)": "z.softmax(dim=2).to(values.dtype).to(work)"}, BRAIN),
    ("entries stay float32", {MIX: MIX.removesuffix(".to(values.dtype)")}, BRAIN),
    ("gates get no gradient", {"z.softmax(dim=2)": "z.softmax(dim=2).detach()"}, GRADIENTS),
    ("the values get no gradient", {"* c)": "* c.detach())"}, GRADIENTS),
]  # fmt: skip

CASES = (
    Case(TWO, lambda g: given(g, 6, 3),
         "a softmax over the three tokens, for each feature; entry 0 from position 2 on", points=3,
         teaching="small enough to write down"),
    Case(RAGGED, ragged, "blocks begin at position 0, and what is left over waits", points=2),
    Case(SHORT, short, "N may be 0: entries (B, 0, D), and a mask (T, 0)"),
    Case(ALONE, lambda g: given(g, 5, 1), "with m = 1 the entries are the values",
         teaching="nothing is pooled"),
    Case(LARGE, large, "a softmax knows how to stay finite", points=2),
    Case(HIDDEN, hidden, "a softmax gives a score of minus infinity the weight 0"),
    Case(BRAIN, lambda g: given(g, 90, 6, torch.bfloat16, 8),
         "compute in float32, and round the sum once", tolerance=(4e-3, 1e-3)),
    Case(GRADIENTS, lambda g: given(g, 6, 3), "values and gates both learn", gradient=True),
)  # fmt: skip

EXERCISE = Exercise(
    name="pooled_keys", function="pooled_keys", page="9_since_qwen2/12_compressed_cache",
    minutes=15, difficulty=2,
    outcome="Pool blocks of tokens to entries, and say which query may read which.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Write the six tokens of two blocks of 3 in a row. From which position on may a query "
        "know something of all three tokens of the first block?",
        "Cut off what waits, and give the tokens an axis for the blocks and one within them: "
        "(B, N, m, D). Along which of them is the softmax?",
        "unflatten(1, (N, m)) makes the axes, for values and gates alike. The softmax and the sum "
        "are over dim=2. An entry stands at the position w * m + m - 1.",
    ),
)  # fmt: skip
