"""A cache that is to follow the beams: which rows, of which tensors, and in whose memory (Q16)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal


class Buffers:
    """The cache of the exercise, filled with the given pairs."""

    def __init__(self, keys: Tensor, values: Tensor, room: int = 3) -> None:
        more = torch.zeros(*keys.shape[:3], room, keys.shape[4])
        self.keys = list(torch.cat([keys, more], dim=3))
        self.values = list(torch.cat([values, more], dim=3))
        self.length = keys.shape[3]

    def append(self, k: Tensor, v: Tensor) -> None:
        for layer in range(len(self.keys)):
            self.keys[layer][:, :, self.length] = k[layer]
            self.values[layer][:, :, self.length] = v[layer]
        self.length += 1


def reference(cache: Buffers, parents: Tensor) -> Buffers:
    """The package's cache selects the rows."""
    P, n = parents.shape
    ours, used = GrowingCache(len(cache.keys)), slice(0, cache.length)
    ours.see(torch.zeros(P * n, cache.length), windows=ours.windows)
    for layer, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        ours[layer].update(k[:, :, used], v[:, :, used])
    ours.select(torch.cat([n * p + parents[p] for p in range(P)]))
    for layer, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        k[:, :, used], v[:, :, used], _ = ours.contents(layer)
    return cache


# -------------------------------------------------------------------------------- how it is used

Reorder = Callable[[Buffers, Tensor], Any]


def contents(cache: Buffers) -> dict[str, Any]:
    """What is in use: (P n, H, length, D) for keys and values of each layer."""
    results = {}
    for layer, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        results[f"the keys of layer {layer}"] = k[:, :, : cache.length].clone()
        results[f"the values of layer {layer}"] = v[:, :, : cache.length].clone()
    return results


def moved(reorder: Reorder, keys: Tensor, values: Tensor, parents: Tensor) -> Any:
    cache = Buffers(keys, values)
    reorder(cache, parents)
    return contents(cache)


def same_memory(reorder: Reorder, keys: Tensor, values: Tensor, parents: Tensor) -> Any:
    cache = Buffers(keys, values)
    held = [*cache.keys, *cache.values]
    before = [part.data_ptr() for part in held]
    reorder(cache, parents)
    after = [*cache.keys, *cache.values]
    return {
        "the buffers are the same objects": len(held) == len(after)
        and all(a is b for a, b in zip(held, after, strict=True)),
        "they lie at the same place": before == [part.data_ptr() for part in held],
        "layer 0, read through the old tensor": held[0][:, :, : keys.shape[3]].clone(),
    }


def same_cache(reorder: Reorder, keys: Tensor, values: Tensor, parents: Tensor) -> Any:
    cache = Buffers(keys, values)
    result = reorder(cache, parents)
    results = "the cache itself" if result is cache else f"another {type(result).__name__}"
    return {
        "what comes back": "nothing" if result is None else results,
        "tokens in use": cache.length,
        **contents(cache),
    }


def two_steps(reorder: Reorder, keys: Tensor, values: Tensor, parents: Tensor, new: Tensor) -> Any:
    cache, results = Buffers(keys, values), {}
    for step in range(2):
        reorder(cache, parents)
        cache.append(new[step, 0], new[step, 1])
        results[f"after step {step + 1}"] = {
            f"{name}, step {step + 1}": part for name, part in contents(cache).items()
        }
    return results


# ------------------------------------------------------------------------------------- arguments


def with_parents(g: Generator, *parents: list[int]) -> Call:
    B = sum(map(len, parents))
    keys, values = normal(g, 2, B, 3, 5, 4), normal(g, 2, B, 3, 5, 4)
    return call(keys=keys, values=values, parents=torch.tensor(parents))


def from_behind(g: Generator) -> Call:
    return with_parents(g, [1, 2, 2])


def continued_twice(g: Generator) -> Call:
    return with_parents(g, [0, 0, 1])


def twice_the_same(g: Generator) -> Call:
    made = with_parents(g, [0, 0, 1, 1])
    made.kwargs["new"] = normal(g, 2, 2, 2, 4, 3, 4)  # steps, keys and values, layers, B, H, D
    return made


# ------------------------------------------------------------------------------- wrong answers

ROWS = "rows = (parents + n * torch.arange(P)[:, None]).flatten()"
LOOP = "for part in cache.keys + cache.values:"
COPY = "part.copy_(part[rows])"
RETURN = "return cache"


def each(order: str = "enumerate(rows.tolist())", move: str = "part[beam] = part[parent]") -> str:
    return f"for beam, parent in {order}:\n            {move}\n        _ = 0"


LOST, MOVED, PAIRS = "parents 0, 0, 1", "parents 1, 2, 2", "three prompts with two beams"
CACHE = "the cache stays a cache"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the code as found",
     {ROWS: "rows = parents.flatten()", LOOP: "for part in cache.keys:", COPY: each(),
      RETURN: "return tuple(zip(cache.keys, cache.values))"}, LOST),
    ("a parent is overwritten before it is read", {COPY: each()}, LOST),
    ("values stay behind", {LOOP: "for part in cache.keys:"}, MOVED),
    ("a parent is overwritten, and the second prompt follows the beams of the first",
     {ROWS: "rows = parents.flatten()", COPY: each()}, LOST),
    ("the second prompt follows the beams of the first",
     {ROWS: "rows = parents.flatten()"}, "two prompts, parents 1, 1, 2 and 2, 2, 2"),
    ("the rows of a prompt begin at its number times the number of prompts",
     {ROWS: "rows = (parents + P * torch.arange(P)[:, None]).flatten() % (P * n)"}, PAIRS),
    ("nothing is moved if the beams of the first prompt stay",
     {ROWS: f"if parents[0].equal(torch.arange(n)):\n        return cache\n    {ROWS}"}, PAIRS),
    ("parents are taken for children: beam i is written to row parents[i]",
     {COPY: "part[rows] = part.clone()"}, "parents 2, 0, 1, 3"),
    ("beams are exchanged with their parents, not copied from them",
     {COPY: each(move="part[[beam, parent]] = part[[parent, beam]]")}, LOST),
    ("the loop runs backwards, where other parents are overwritten",
     {COPY: each("reversed(list(enumerate(rows.tolist())))")}, MOVED),
    ("copies from behind first, then those from the front: a ring needs a third place",
     {COPY: each(
      "sorted(enumerate(rows.tolist()), key=lambda pair: (pair[1] < pair[0], "
      "pair[0] if pair[1] >= pair[0] else -pair[0]))"
      )}, "parents 2, 0, 1, 3"),
    ("values become copies of the keys",
     {LOOP: "for k, v in zip(cache.keys, cache.values):\n        v.copy_(k[rows])\n"
      "    for part in cache.keys:"}, MOVED),
    ("only the first layer follows",
     {LOOP: "for part in (cache.keys[0], cache.values[0]):"}, MOVED),
    ("the copy of layer 0 serves all layers",
     {LOOP: "old = [cache.keys[0].clone(), cache.values[0].clone()]\n    "
      "for i, part in enumerate(cache.keys + cache.values):",
      COPY: "part.copy_(old[i // len(cache.keys)][rows])"}, "every beam is its own parent"),
    ("the beams are put in the order of their parents",
     {ROWS: f"{ROWS}.sort().values"}, "parents 2, 0, 1, 3"),
    ("the newest token stays behind",
     {COPY: "part[:, :, : cache.length - 1] = part[rows][:, :, : cache.length - 1]"}, LOST),
    ("new tensors in the lists, instead of new numbers in the tensors",
     {LOOP: "cache.keys = [part[rows] for part in cache.keys]\n"
      "    cache.values = [part[rows] for part in cache.values]\n    for part in ():"},
     "the buffers stay where they are"),
    ("only new names: the tensors in the lists stay as they were",
     {COPY: "part = part[rows]"}, LOST),
    ("the result is a tuple of tensors",
     {RETURN: "return tuple(zip(cache.keys, cache.values))"}, CACHE),
    ("nothing is returned", {RETURN: "return None"}, CACHE),
    ("index_select writes into what it reads",
     {COPY: "torch.index_select(part, 0, rows, out=part)"}, LOST),
]  # fmt: skip

CASES = (
    Case("every beam is its own parent", lambda g: with_parents(g, [0, 1, 2]),
         "nothing moves, and nothing may be lost", use=moved, guard=True,
         teaching="what the code as found did right"),
    Case(MOVED, from_behind, "compare keys with values: both must follow, in every layer", points=2,
         use=moved, teaching="a loop in place is right here, so that only what is left out shows"),
    Case(LOST, continued_twice,
         "beam 2 needs beam 1 as it was before beam 1 became a copy of beam 0", points=3, use=moved,
         teaching="the step of the page, and the plainest where a parent is overwritten"),
    Case("parents 2, 0, 1, 3", lambda g: with_parents(g, [2, 0, 1, 3]),
         "three beams change places in a ring: no order of single copies is right", use=moved),
    Case("two prompts, parents 1, 1, 2 and 2, 2, 2",
         lambda g: with_parents(g, [1, 1, 2], [2, 2, 2]),
         "parent 2 of the second prompt is row 3 + 2", points=2, use=moved,
         teaching="two prompts, without a parent that is overwritten"),
    Case(PAIRS, lambda g: with_parents(g, [0, 1], [1, 1], [0, 0]),
         "the rows of prompt p begin at p times the number of beams", use=moved),
    Case("the buffers stay where they are", continued_twice,
         "write into the tensors; do not put others into the lists", use=same_memory),
    Case(CACHE, from_behind,
         "a tuple of tensors has neither `length` nor `append`", use=same_cache),
    Case("two steps, new tokens between them", twice_the_same,
         "two beams with one parent go on with different tokens", use=two_steps,
         teaching="the use in a search: no beam's new token may reach its sister"),
)  # fmt: skip

EXERCISE = Exercise(
    name="hunt_beam_reorder", function="reorder", page="6_generation/1_beam_search", minutes=25,
    difficulty=2,
    outcome="Fix the reordering of a cache so that every beam goes on from its parent's keys and "
            "values, in buffers that stay where they are.",
    after=("growing_cache",), reference=reference, hunt="Q16", cases=CASES, wrong=planted(WRONG),
    hints=(
        "Take three beams with one number each, 10, 20, 30, and parents 0, 0, 1. Follow the loop "
        "by hand. Then ask which tensors it never touches.",
        "There are four faults: values stay behind; a parent is overwritten before it is read; "
        "parents of the second prompt are taken for rows of the first; and what comes back is no "
        "cache.",
        "`part[rows]` with a tensor of rows is a copy: all of it is read before anything is "
        "written. How many rows lie before the beams of prompt p? The stories "
        "are in the bug museum of the page 6_generation/1a_beam_search_in_depth: caches of "
        "transformers that stayed behind, "
        "https://github.com/huggingface/transformers/issues/46612, and Q16, a cache that became a "
        "tuple.",
    ),
)  # fmt: skip
