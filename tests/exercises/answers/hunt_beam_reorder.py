"""Answers to hunt_beam_reorder: other right ones, and wrong ones of a second person."""

import torch

from lm_from_scratch.exercises.catalogue.hunt_beam_reorder.checks import COPY


def by_loop(cache, parents):
    """Row by row, from a copy of all that was there."""
    n = parents.shape[1]
    for parts in (cache.keys, cache.values):
        old = [part.clone() for part in parts]
        for prompt, line in enumerate(parents.tolist()):
            for beam, parent in enumerate(line):
                for part, before in zip(parts, old, strict=True):
                    part[prompt * n + beam] = before[prompt * n + parent]
    return cache


def by_prompt(cache, parents):
    """The prompts get an axis of their own; only what is in use is moved."""
    for part in [*cache.values, *cache.keys]:
        split = part[:, :, : cache.length].unflatten(0, tuple(parents.shape))
        where = parents[:, :, None, None, None].expand_as(split)
        part[:, :, : cache.length] = split.gather(1, where).flatten(0, 1)
    return cache


def by_product(cache, parents):
    """A matrix with a single 1 in each row."""
    n = parents.shape[1]
    blocks = (parents[:, :, None] == torch.arange(n)).float()
    chosen = torch.block_diag(*blocks)  # (B, B)
    for part in cache.keys + cache.values:
        part[:] = torch.einsum("bc,c...->b...", chosen, part)
    return cache


RIGHT = [
    by_loop, by_prompt, by_product,
    # index_select
    {COPY: "part[:] = part.index_select(0, rows)"},
]  # fmt: skip

ROWS = "(parents + n * torch.arange(P)[:, None]).flatten()"
EVERY_PART = "    for part in cache.keys + cache.values:\n"
COPIED = f"{EVERY_PART}        {COPY}  # the index makes a copy, then it is written\n"

WRONG = [
    ("the memory is exchanged under the tensor", {COPY: "part.data = part.data[rows]"}),
    ("the beams of the prompts alternate",
     {ROWS: "(parents * P + torch.arange(P)[:, None]).T.flatten()"}),
    ("the offset is added to the argument",
     {f"rows = {ROWS}": "parents += n * torch.arange(P)[:, None]\n    rows = parents.flatten()"}),
    ("the last token alone",
     {COPY: "part[:, :, cache.length - 1] = part[rows, :, cache.length - 1]"}),
    ("the values are reordered twice", {"+ cache.values": "+ cache.values + cache.values"}),
    ("new buffers are returned",
     {COPIED: "    old, cache = cache, object.__new__(type(cache))\n"
      "    cache.keys, cache.values = [x[rows] for x in old.keys], [x[rows] for x in old.values]\n"
      "    cache.length = old.length\n"}),
    ("the length is counted on", {"return cache": "cache.length += 1\n    return cache"}),
]  # fmt: skip
