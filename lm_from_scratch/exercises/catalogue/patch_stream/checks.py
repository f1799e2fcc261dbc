"""Patching: whose state is put where, at which layer, and what goes on from there."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer, normal
from lm_from_scratch.inside.patching import put

Block = Callable[[Tensor], Tensor]


def reference(
    blocks: list[Block], x: Tensor, source: Tensor, layer: int, tokens: list[int]
) -> Tensor:
    """The package's edit between the blocks before it and those after it."""
    for block in blocks[:layer]:
        x, source = block(x), block(source)
    where = torch.zeros(x.shape[:2], dtype=torch.bool)
    where[:, tokens] = True
    x = put(source, where)(x)
    for block in blocks[layer:]:
        x = block(x)
    return x


# ------------------------------------------------------------------------------------- arguments


def mixing(g: Generator, C: int, dtype: torch.dtype = torch.float32) -> Block:
    """A block that adds to each token what it makes of itself and of the tokens before it."""
    own, before = normal(g, C, C, dtype=dtype), normal(g, C, C, dtype=dtype)

    def block(x: Tensor) -> Tensor:
        places = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return x + (x @ own + x.cumsum(1) / places @ before).tanh()

    return block


def given(
    g: Generator, layer: int, tokens: list[int], L: int = 4, dtype: torch.dtype = torch.float32
) -> Call:
    """Four blocks, all different; two rows of six tokens."""
    blocks = [mixing(g, 3, dtype) for _ in range(L)]
    x, source = normal(g, 2, 6, 3, dtype=dtype), normal(g, 2, 6, 3, dtype=dtype)
    return call(blocks, x, source, layer, tokens)


def one(g: Generator) -> Call:
    return given(g, 2, [integer(g, 1, 5)])


def several(g: Generator) -> Call:
    first = integer(g, 0, 3)
    return given(g, 1, [first + 2, first])


def own(g: Generator) -> Call:
    """The source is the text itself: the same tensor."""
    blocks, x, _, layer, tokens = given(g, 2, [1, 3]).args
    return call(blocks, x, x, layer, tokens)


def long(g: Generator) -> Call:
    """Places far from the beginning."""
    T = 40_000
    return call(
        [mixing(g, 1), mixing(g, 1)], normal(g, 1, T, 1), normal(g, 1, T, 1), 1, [33_000, T - 7]
    )


def kept(function: Any, blocks: list[Block], *rest: Any) -> dict[str, Any]:
    """The result, and whether all that the blocks returned is as it was."""
    returned: list[tuple[Tensor, Tensor]] = []

    def keeping(block: Block) -> Block:
        def run(x: Tensor) -> Tensor:
            y = block(x)
            returned.append((y, y.clone()))
            return y

        return run

    result = function([keeping(block) for block in blocks], *rest)
    stays = all(torch.equal(y, before) for y, before in returned)
    return {"the result": result, "what the blocks returned is as it was": stays}


# ------------------------------------------------------------------------------- wrong answers

ONE, SEVERAL, ALL, NONE, OWN = "one token", "two tokens", "all tokens", "no token", "its own states"
FIRST, LAST, END = "in front of the first block", "behind the last block", "the last token"
LONG, KEPT, GRADIENTS = "a long text", "what blocks have returned", "gradients and float64"

RUN = "x = block(x)\n        source = block(source)"
CLONE, PUT = "patched = x.clone()", "patched[:, tokens] = source[:, tokens]"
AFTER = "for block in blocks[layer:]:\n        patched = block(patched)"
BEFORE = "for block in blocks[:layer]"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the patch comes after block `layer`, not in front of it",
     {BEFORE: "for block in blocks[: layer + 1]", "blocks[layer:]": "blocks[layer + 1 :]"}, ONE),
    ("the patch comes one block too early",
     {BEFORE: "for block in blocks[: max(layer - 1, 0)]",
      "blocks[layer:]": "blocks[max(layer - 1, 0) :]"}, ONE),
    ("the patch is made in front of the first block, whatever the layer is",
     {BEFORE: "for block in blocks[:0]", "blocks[layer:]": "blocks"}, ONE),
    ("the state of the source is taken in front of the first block",
     {RUN: "x = block(x)"}, ONE),
    ("the state of the source is taken behind the last block",
     {PUT: "for block in blocks[layer:]:\n        source = block(source)\n    " + PUT}, ONE),
    ("the runs are exchanged: the source goes on, with states of x",
     {CLONE: "patched = source.clone()", PUT: "patched[:, tokens] = x[:, tokens]"}, ONE),
    ("all tokens are patched", {PUT: "patched[:] = source"}, ONE),
    ("the tokens are patched again in front of every later block",
     {AFTER: "for block in blocks[layer:]:\n        patched, source = block(patched), "
      "block(source)\n        patched = patched.clone()\n        "
      "patched[:, tokens] = source[:, tokens]"}, ONE),
    ("the patched tokens stay as they are: later blocks do not change them",
     {AFTER: "for block in blocks[layer:]:\n        patched = block(patched).clone()\n        "
      "patched[:, tokens] = source[:, tokens]"}, ONE),
    ("the other tokens do not hear of the patch",
     {AFTER: "for block in blocks[layer:]:\n        x, source = block(x), block(source)\n    "
      "patched = x.clone()\n    patched[:, tokens] = source[:, tokens]"}, ONE),
    ("every token from there on is patched",
     {PUT: "patched[:, min(tokens, default=6) :] = source[:, min(tokens, default=6) :]"}, ONE),
    ("the state is added, not put in its place",
     {PUT: "patched[:, tokens] = patched[:, tokens] + source[:, tokens]"}, ONE),
    ("half of it stays: the mean of both states",
     {PUT: "patched[:, tokens] = (patched[:, tokens] + source[:, tokens]) / 2"}, ONE),
    ("the state becomes 0, as in an ablation", {PUT: "patched[:, tokens] = 0.0"}, ONE),
    ("the first row alone is patched", {PUT: "patched[0, tokens] = source[0, tokens]"}, ONE),
    ("all rows get the state of the first row's source",
     {PUT: "patched[:, tokens] = source[:1, tokens]"}, ONE),
    ("the run ends at the patch", {AFTER: "pass"}, ONE),
    ("the result is the patched states alone, behind the last block",
     {"return patched": "return patched[:, tokens]"}, ONE),
    ("what the patch changes, not the result",
     {"return patched": "for block in blocks[layer:]:\n        x = block(x)\n    "
      "return patched - x"}, ONE),
    ("the first of the tokens alone is patched",
     {PUT: "patched[:, tokens[:1]] = source[:, tokens[:1]]"}, SEVERAL),
    ("the tokens are taken for a range, from the first to the last",
     {PUT: "span = slice(min(tokens, default=0), max(tokens, default=-1) + 1)\n    "
      "patched[:, span] = source[:, span]"}, SEVERAL),
    ("states of the source are put there in another order",
     {PUT: "patched[:, tokens] = source[:, sorted(tokens)]"}, SEVERAL),
    ("no token stands for all of them",
     {PUT: "tokens = tokens or list(range(x.shape[1]))\n    " + PUT}, NONE),
    ("an empty list is refused",
     {PUT: "if not tokens:\n        raise ValueError(tokens)\n    " + PUT}, NONE),
    ("-1 is no place: a mask of places or a slice of one token misses it",
     {PUT: "for token in tokens:\n        patched[:, token : token + 1] = source[:, token : token "
      "+ 1]"}, END),
    ("L is refused, or taken for the last block",
     {BEFORE: "layer = min(layer, len(blocks) - 1)\n    " + BEFORE}, LAST),
    ("layer 0 is taken for the last place", {BEFORE: "layer = layer or len(blocks)\n    " + BEFORE},
     FIRST),
    ("the patch is written into x", {CLONE: "patched = x"}, FIRST),
    ("it is written into what a block has returned",
     {CLONE: "patched = x.clone() if layer == 0 else x"}, KEPT),
    ("no gradient reaches the source", {PUT: "patched[:, tokens] = source[:, tokens].detach()"},
     GRADIENTS),
    ("no gradient reaches x", {CLONE: "patched = x.detach().clone()"}, GRADIENTS),
    ("the states are kept in half precision",
     {PUT: "patched[:, tokens] = source[:, tokens].half().to(x.dtype)"}, ONE),
]  # fmt: skip

CASES = (
    Case(ONE, one, "run both to the place, put one state of the source there, and go on from it",
         points=3, teaching="the idea alone"),
    Case(SEVERAL, several, "the tokens are put there together, in one run", points=2),
    Case(ALL, lambda g: given(g, 2, [*range(6)]),
         "with all tokens patched, the source's own run goes on", teaching="the first law"),
    Case(OWN, own, "what was there before is there again: nothing changes",
         teaching="the second law"),
    Case(NONE, lambda g: given(g, 2, []), "without a token nothing is patched"),
    Case(FIRST, lambda g: given(g, 0, [integer(g, 0, 6)]),
         "in front of the first block are x and source themselves, and both stay as they are"),
    Case(LAST, lambda g: given(g, 4, [integer(g, 0, 6)]),
         "behind the last block, no block comes after the patch"),
    Case(END, lambda g: given(g, 2, [-1]), "-1 is the last token"),
    Case(KEPT, one, "write into a copy: the caller may have kept what a block returned",
         use=kept),
    Case(LONG, long, "the stream is as long as it is", teaching="places above 32,768"),
    Case(GRADIENTS, lambda g: given(g, 2, [1, 4], dtype=torch.float64),
         "both states have their gradient, with all their digits", gradient=True),
)  # fmt: skip

EXERCISE = Exercise(
    name="patch_stream", function="patch_stream", page="11_look_inside/2_patching",
    minutes=15, difficulty=1,
    outcome="Put a state of another run into a run, at one place, and let it go on from there.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Draw both runs as two rows of boxes. Up to which box do you need the second row, and from "
        "which box on does the first one hear of it?",
        "blocks[:layer] are the blocks in front of the place, and blocks[layer:] those behind it; "
        "either may be empty.",
        "Index with the whole list, `[:, tokens]`, and write into a copy: x.clone(). Then the rest "
        "of the blocks sees all tokens, patched and not.",
    ),
)  # fmt: skip
