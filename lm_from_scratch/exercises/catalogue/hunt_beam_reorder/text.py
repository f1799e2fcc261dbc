# %% [markdown]
# # Bug hunt: beams that remember another text
#
# A beam search got a cache with fixed buffers, because a compiled graph reads
# them by their address. Nothing failed. For the prompt "When the", three beams and
# 12 tokens of the shipped GPT-2, the search reported a log-probability of -9.21
# for its best text. One full pass over this text, without any cache, gave -33.03.
# Somebody fixed one line: -8.36 was reported, -9.51 was true. With one beam all
# was well, and so were the first steps of every search.
#
# After each step the beams change: beam i goes on from the text of beam
# `parents[i]`, so its keys and values must become those of that beam. Below is the
# function that moves them. Find what is wrong, and write the fixed function
# `reorder(cache, parents)`. What holds for it:
#
# - `cache` is a `Buffers` as below: `keys` and `values` are lists with one tensor
#   `(B, H, room, D)` for each layer, and `length` tokens of the room are in use.
#   What lies after them belongs to no beam.
# - A batch holds P prompts with n beams each, so B = P n. The beams of prompt 0 are
#   the rows 0 ... n - 1, those of prompt 1 the rows n ... 2 n - 1, and so on.
# - `parents` has shape `(P, n)`, int64. It counts *within* each prompt, from 0 to
#   n - 1. A beam may be the parent of several or of none, in any order.
# - Afterwards each beam holds what its parent held *before* the call, in keys and
#   values of all layers, and later tokens of one beam do not reach another.
# - The buffers stay the tensors that they were, at the same place in memory:
#   `cache.keys[0]` before and after is one object.
# - The function returns `cache` itself, so that the search can go on with it.
# - `parents` stays as it is.

# %%
import torch
from torch import Tensor


class Buffers:
    """Keys and values of all beams, in memory that is made once."""

    def __init__(self, n_layer: int, B: int, H: int, room: int, D: int) -> None:
        self.keys = [torch.zeros(B, H, room, D) for _ in range(n_layer)]
        self.values = [torch.zeros(B, H, room, D) for _ in range(n_layer)]
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> None:
        """The next token of every beam: k and v are (n_layer, B, H, D)."""
        for layer in range(len(self.keys)):
            self.keys[layer][:, :, self.length] = k[layer]
            self.values[layer][:, :, self.length] = v[layer]
        self.length += 1


# %%
def reorder_as_found(cache: Buffers, parents: Tensor) -> Buffers:
    for keys in cache.keys:
        for beam, parent in enumerate(parents.flatten().tolist()):
            keys[beam] = keys[parent]
    return tuple(zip(cache.keys, cache.values))


# %%
from lm_from_scratch.exercises import check

check("hunt_beam_reorder", reorder_as_found)

# %% [markdown]
# There is more than one fault, and fixing one uncovers the next. Now write the
# fixed function.


# %%
def reorder(cache: Buffers, parents: Tensor) -> Buffers:
    """Let each beam go on from its parent (P, n), in the buffers that are there."""
    ### BEGIN SOLUTION
    P, n = parents.shape
    rows = (parents + n * torch.arange(P)[:, None]).flatten()
    for part in cache.keys + cache.values:
        part.copy_(part[rows])  # the index makes a copy, then it is written
    return cache
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("hunt_beam_reorder", reorder)
### BEGIN HIDDEN TESTS
points = min(points, check("hunt_beam_reorder", reorder, seed=7341))
### END HIDDEN TESTS
float(points)
