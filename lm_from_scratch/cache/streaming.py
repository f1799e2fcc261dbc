r"""A window that also keeps the first tokens: a text without end, in a cache that does not grow.

A model that was trained to see everything breaks when a window pushes out the token on which its
heads spend their spare weight. Two or four slots are enough to keep it: a query at position
:math:`t` sees the W keys up to its own, and the F first tokens of its row.

.. math::

   s \le t \quad \text{and} \quad (s > t - W \ \ \text{or} \ \ s < F)

Positions decide, as everywhere: the rule is about where a token stands in its text, not about
slots, and keys keep the rotation with which they came. (The paper numbers the tokens by their slots
instead, so that no distance is longer than those of the training; here a model needs positions that
it was trained for.) A model does not know of it: what it computes is changed on purpose.

Source: Xiao et al., *Efficient Streaming Language Models with Attention Sinks*, 2023,
arXiv:2309.17453.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.buffer import BufferCache, Plan
from lm_from_scratch.cache.codec import EXACT, Codec
from lm_from_scratch.cache.interface import Cache, LayerCache
from lm_from_scratch.cache.slots import SlidingTrack
from lm_from_scratch.limits import Count, Whole, require


def keep_first(visibility: Visibility, window: int, first: int) -> Visibility:
    """The same tokens seen through a window of that many keys, and beside it the ``first`` ones of
    each row (of each document, where several are packed)."""
    query = visibility.query_positions[:, None, :, None]  # (B, 1, T, 1)
    key = visibility.key_positions[:, None, None, :]  # (B, 1, 1, S)
    allowed = (key > query - window) | (key < first)
    if visibility.allowed is not None:
        allowed = allowed & visibility.allowed
    return replace(visibility, allowed=allowed)


class Streaming(Cache):
    """Another cache, seen by the rule above. It forgets nothing and saves nothing: it says what
    :class:`StreamingCache` must compute. ``Streaming(NO_CACHE, window, first)`` is one full pass.
    """

    def __init__(self, cache: Cache, window: int, first: int) -> None:
        require(Count, window=window)
        require(Whole, first=first)
        self.cache, self.window, self.first = cache, window, first

    @property
    def length(self) -> int:
        return self.cache.length

    def see(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        windows: Sequence[int | None] = (None,),
        *,
        siblings: bool = False,
    ) -> list[Visibility]:
        seen = self.cache.see(x, positions, documents, windows, siblings=siblings)
        # layers that share one visibility still do
        less = {id(one): keep_first(one, self.window, self.first) for one in seen}
        return [less[id(one)] for one in seen]

    def __getitem__(self, layer: int) -> LayerCache:
        return self.cache[layer]


class StreamingTrack(SlidingTrack):
    """Slot ``p`` holds position ``p`` below ``first``, for ever; behind these slots the others are
    a ring. It takes layers that see everything: they see what is kept."""

    def __init__(self, window: int, first: int, slack: int = 0) -> None:
        super().__init__(window, slack)
        require(Whole, first=first)
        self.window = None  # of the layers
        self.first, self.slots = first, first + window + slack

    def slot(self, positions: Tensor) -> Tensor:
        behind = (positions - self.first) % (self.slots - self.first) + self.first
        return torch.where(positions < self.first, positions, behind)

    def kept(self, new: Tensor) -> Tensor:
        late = new > new.amax(dim=1, keepdim=True) - (self.slots - self.first)
        return (new >= 0) & (late | (new < self.first))

    def plan(self, new: Tensor, start: int | None, windows: Collection[int | None]) -> Plan:
        """As for a ring, of tokens at ``new`` (B, T), seen by the rule above."""
        plan, T = super().plan(new, start, windows), new.shape[1]
        all_held = T == 1 and self.slack == 0 and set(windows) == {None}
        if start is not None and (start + T <= self.latest or all_held):
            return plan  # nothing that is held is too old
        return replace(plan, visibility=keep_first(plan.visibility, self.latest, self.first))


class StreamingCache(BufferCache):
    """The ``first`` tokens of each row and the latest ``window``, for any model: memory does not
    grow with the text. ``slack`` is as in :class:`~lm_from_scratch.cache.slots.SlidingCache`."""

    def __init__(
        self, n_layer: int, window: int, first: int, slack: int = 0, codec: Codec = EXACT
    ) -> None:
        super().__init__([StreamingTrack(window, first, slack)], [0] * n_layer, codec)
