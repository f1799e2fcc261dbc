"""Your cache in the model: it keeps the keys and values of what was read and written."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.codec import Codec
from lm_from_scratch.cache.interface import Cache, NoCache
from lm_from_scratch.exercises.parts import Machine, Part


class OfPairs(Cache):
    """A student's cache, as a model speaks to one."""

    def __init__(self, pairs: Any, codec: Codec) -> None:
        self.pairs, self.codec = pairs, codec
        self.places: Tensor | None = (
            None  # of the keys, (B, S): padding is no matter of the student's
        )

    @property
    def length(self) -> int:
        """The tokens that are held."""
        return int(self.pairs.length)

    def see(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        windows: Sequence[int | None] = (None,),
        *,
        siblings: bool = False,
    ) -> list[Visibility]:
        """What the student's ``see`` says."""
        new, mask = self.pairs.see(x.shape[1])  # (T,), (T, S)
        placed = new[None] if positions is None else positions
        before = [] if self.places is None else [self.places]
        self.places = torch.cat([*before, placed], dim=1)
        seen = Visibility(placed, self.places)
        # the student's mask, and not the one that the positions give
        seen._mask = mask & (self.places >= 0)[:, None, None]
        return [seen] * len(windows)

    def select(self, rows: Tensor) -> None:
        """These rows, in this order."""
        self.pairs.select(rows)
        if self.places is not None and len(self.places) > 1:
            self.places = self.places[rows]

    def crop(self, length: int) -> None:
        """Forget what is at this position and after it."""
        self.pairs.crop(length)
        self.places = None if self.places is None else self.places[:, :length]

    def __getitem__(self, layer: int) -> "LayerOfPairs":
        return LayerOfPairs(self, layer)


class LayerOfPairs(NoCache):
    """One layer of it."""

    def __init__(self, cache: OfPairs, layer: int) -> None:
        self.cache, self.layer = cache, layer

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, as the codec keeps them."""
        codec = self.cache.codec
        rounded = [codec.decode(codec.encode(x)) for x in (k, v)]
        found: tuple[Tensor, Tensor] = self.cache.pairs.update(self.layer, *rounded)
        return found


def put(machine: Machine, GrowingPairs: Callable[..., Any]) -> None:
    machine.cache = lambda layers: OfPairs(GrowingPairs(layers), machine.codec)


PART = Part("keys and values, kept", put, apart=("learn",))
