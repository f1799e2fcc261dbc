"""Your ring in the model: blocks 1, 3, 5, ... see the last 8 tokens alone, and a ring for each of
them keeps no more. The other blocks see everything, through the cache that was there before."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import Cache, NoCache
from lm_from_scratch.exercises.parts import Machine, Part
from lm_from_scratch.models.qwen2 import FULL, SLIDING

WINDOW = 8


class WithRings(Cache):
    """Rings of a student for the layers that slide, and another cache for the rest."""

    def __init__(self, rings: dict[int, Any], rest: Cache) -> None:
        self.rings, self.rest = rings, rest
        self.seen: list[Visibility] = []

    @property
    def length(self) -> int:
        """The tokens that were read."""
        return self.rest.length

    def see(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        windows: Sequence[int | None] = (None,),
        *,
        siblings: bool = False,
    ) -> list[Visibility]:
        """What the other cache says; which keys a ring gives back, it says when it is updated."""
        whole, *_ = self.rest.see(x, positions, documents, [w for w in windows if w is None])
        own = whole.query_positions
        self.seen = [whole if w is None else Visibility(own, own, window=w) for w in windows]
        return self.seen

    def __getitem__(self, layer: int) -> Any:
        if layer in self.rings:
            return LayerOfRing(self.rings[layer], self.seen[layer])
        return self.rest[layer - sum(ring < layer for ring in self.rings)]


class LayerOfRing(NoCache):
    """One layer that slides."""

    def __init__(self, ring: Any, seen: Visibility) -> None:
        self.ring, self.seen = ring, seen

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What the ring gives back; where its keys are decides what is seen of them."""
        keys, values, positions = self.ring.update(k, v)
        self.seen.key_positions = positions[None]
        return keys, values


def put(machine: Machine, RingPairs: Callable[..., Any]) -> None:
    backbone, rest = machine.model.model, machine.cache
    slides = [block % 2 == 1 for block in range(machine.layers)]
    backbone.config = replace(
        backbone.config,
        sliding_window=WINDOW,
        layer_types=tuple(SLIDING if slide else FULL for slide in slides),
    )

    def cache(layers: int) -> WithRings:
        rings = {layer: RingPairs(WINDOW) for layer in range(layers) if slides[layer]}
        return WithRings(rings, rest(layers - len(rings)))

    machine.cache = cache


PART = Part("a ring of 8 keys, in odd blocks", put, apart=("batch", "search", "draft", "learn"))
