# %% [markdown]
# # A ring of W slots
#
# A layer with a sliding window of W keys never asks for a key that is W or more
# tokens old. So W slots are enough for a text of any length: the token at
# position $p$ lives in slot $p \bmod W$, over the token that was there W
# positions before. Write this ring for one layer. The rule that decides what a
# query sees is applied outside, from the positions that you return: a query at
# position $q$ sees the keys at $q - W + 1, \dots, q$, and no key at -1.
#
# What holds for your class `RingPairs(window)`, where W = `window`, at least 1:
#
# - `length` is the number of tokens fed so far, a plain `int`, 0 at first.
# - `update(k, v)` takes the keys `(B, H, T, D)` and values `(B, H, T, E)` of the
#   next T tokens. T is at least 1, may differ from call to call, and may be
#   larger than W. The first token of a text is at position 0.
# - It returns three tensors: keys `(B, H, S, D)`, values `(B, H, S, E)`, and the
#   position of each, `(S,)`, int64, -1 for a slot that holds nothing. The order is
#   free, and S is at most W + T. Every one of the T tokens must find there all
#   keys of its window, its own included, each of them once. They are read before
#   the next update, and may share memory with the ring.
# - After each update the ring itself is in `keys` `(B, H, W, D)`, `values`
#   `(B, H, W, E)` and `positions` `(W,)`: the last W tokens, each in its slot, and
#   -1 where a slot was never written.
# - Keys and values keep their dtype. `k` and `v` stay as they are, and what the
#   caller writes into them later does not reach the ring.
# - `reset()` forgets everything: then a text with other B, H, D, E or another
#   dtype may come. Two rings share nothing.

# %%
import torch
from torch import Tensor


# %%
class RingPairs:
    """The keys and values of the last `window` tokens."""

    def __init__(self, window: int) -> None:
        ### BEGIN SOLUTION
        self.window = window
        self.reset()
        ### END SOLUTION

    def reset(self) -> None:
        """Forget everything."""
        ### BEGIN SOLUTION
        self.length = 0
        self.positions = torch.full((self.window,), -1)
        ### END SOLUTION

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take the next tokens; get keys, values and positions that they may see."""
        ### BEGIN SOLUTION
        new = torch.arange(self.length, self.length + k.shape[2])
        if self.length == 0:
            self.keys = k.new_zeros(*k.shape[:2], self.window, k.shape[3])
            self.values = v.new_zeros(*v.shape[:2], self.window, v.shape[3])
        keys = torch.cat([self.keys, k], dim=2)
        values = torch.cat([self.values, v], dim=2)
        positions = torch.cat([self.positions, new])

        last = slice(-self.window, None)
        slots = new[last] % self.window
        self.keys[:, :, slots] = k[:, :, last]
        self.values[:, :, slots] = v[:, :, last]
        self.positions[slots] = new[last]
        self.length += len(new)
        return keys, values, positions
        ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("ring_cache", RingPairs)
### BEGIN HIDDEN TESTS
points = min(points, check("ring_cache", RingPairs, seed=7341))
### END HIDDEN TESTS
float(points)
