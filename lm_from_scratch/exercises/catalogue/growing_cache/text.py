# %% [markdown]
# # A cache that grows
#
# Keys and values of earlier tokens never change. Write the cache that keeps
# them, so that a model reads each token once. A pass over `T` new tokens asks it
# three things: how many tokens are held, what the new ones may see, and, in each
# layer, for all keys and values in exchange for the new ones. The law that it
# obeys: *passes over the pieces of a text give what one pass over all of it
# gives.*
#
# What holds for your class `GrowingPairs(n_layer)`:
#
# - `length` is the number of tokens held, a plain `int`, 0 at first. A token
#   counts when the *last* layer has got it: while a pass is under way, `length`
#   stays.
# - `see(T)` changes nothing. It returns the positions of the next `T` tokens,
#   shape `(T,)`, int64, the first token of a text standing at 0; and a mask
#   `(T, length + T)`, bool, True where a new token may see a key: its own and all
#   before it.
# - `update(layer, k, v)` adds the keys `(B, H, T, D)` and values `(B, H, T, E)` of
#   the next `T` tokens to one layer. It returns the pair of all keys and values
#   of that layer, in the order in which they came, `(B, H, S, D)` and
#   `(B, H, S, E)`. A pass calls it for layers 0, 1, ... in turn.
# - A pass that stops before the last layer has not happened: the next pass begins
#   with the tokens that `length` counts, in every layer.
# - A layer that is not in 0 ... `n_layer` - 1 raises `ValueError`. So do keys or
#   values with another number of rows `B`, or of another dtype, than those that
#   this layer holds. A refused call leaves the cache as it was. Heads and widths
#   need no check. If `length` is 0 after a pass that stopped or after `crop(0)`, you
#   may refuse or accept other rows or another dtype.
# - `select(rows)`, a tensor of whole numbers, keeps these rows of the batch in
#   this order. A row may be there twice.
# - `crop(length)`, with at most the length that is held, forgets the tokens at this
#   position and after it. `reset()` forgets everything, also how many rows there
#   were and of which dtype.
# - What the caller does with `k` and `v` afterwards does not reach the cache. `k`
#   and `v` themselves stay as they are. Nothing that is held or returned requires
#   a gradient. Two caches share nothing.
#
# You need not save copies: `torch.cat` at every step is good enough here.

# %%
import torch
from torch import Tensor


# %%
class GrowingPairs:
    """Keys and values of every layer, one pair more for each token."""

    def __init__(self, n_layer: int) -> None:
        ### BEGIN SOLUTION
        self.n_layer = n_layer
        self.reset()
        ### END SOLUTION

    def reset(self) -> None:
        """Forget everything."""
        ### BEGIN SOLUTION
        self.held: list[list[Tensor]] = [[] for _ in range(self.n_layer)]
        ### END SOLUTION

    @property
    def length(self) -> int:
        """Tokens that every layer has got."""
        ### BEGIN SOLUTION
        return self.held[-1][0].shape[2] if self.held[-1] else 0
        ### END SOLUTION

    def see(self, T: int) -> tuple[Tensor, Tensor]:
        """Positions (T,) of the next tokens, and which keys they see (T, S)."""
        ### BEGIN SOLUTION
        keys = torch.arange(self.length + T)
        positions = keys[self.length :]
        return positions, keys <= positions[:, None]
        ### END SOLUTION

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's new pairs (B, H, T, ...); get all of them."""
        ### BEGIN SOLUTION
        if not 0 <= layer < self.n_layer:
            raise ValueError(f"there is no layer {layer}")
        new = [k.detach(), v.detach()]
        pairs = list(zip(self.held[layer] or new, new))
        if any(len(old) != len(x) or old.dtype != x.dtype for old, x in pairs):
            raise ValueError("other rows or another dtype than is held")
        held = self.length  # of an empty layer nothing is left by the cut
        keys, values = (torch.cat([old[:, :, :held], x], 2) for old, x in pairs)
        self.held[layer] = [keys, values]
        return keys, values
        ### END SOLUTION

    def crop(self, length: int) -> None:
        """Forget the tokens at this position and after it."""
        ### BEGIN SOLUTION
        self.held = [[x[:, :, :length] for x in pair] for pair in self.held]
        ### END SOLUTION

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        ### BEGIN SOLUTION
        self.held = [[x[rows] for x in pair] for pair in self.held]
        ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("growing_cache", GrowingPairs)
### BEGIN HIDDEN TESTS
points = min(points, check("growing_cache", GrowingPairs, seed=7341))
### END HIDDEN TESTS
float(points)
