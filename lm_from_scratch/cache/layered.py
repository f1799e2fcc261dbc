"""Different caches for different layers: a ring where a layer slides, all keys elsewhere."""

from collections.abc import Sequence

from torch import Tensor

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.codec import EXACT, Codec
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import Cache, KVCache, Layer, NoCache
from lm_from_scratch.cache.slots import SlidingCache


class LayeredCache(Cache):
    """Several caches that share a model's layers: layer ``i`` belongs to ``parts[owner[i]]``.

    The layers of a part are numbered from 0 in it, in the order of the model's layers. Raises
    ``ValueError`` where ``owner`` does not give every part its layers.
    """

    def __init__(self, parts: Sequence[KVCache], owner: Sequence[int]) -> None:
        self.parts, self.owner = list(parts), list(owner)
        for number, part in enumerate(self.parts):
            if self.owner.count(number) != len(part.layers):
                raise ValueError(
                    f"part {number} has {len(part.layers)} layers, but owner={self.owner} gives it "
                    f"{self.owner.count(number)}"
                )
        if not set(self.owner) <= set(range(len(self.parts))) or not self.owner:
            raise ValueError(f"owner={self.owner} names others than the {len(self.parts)} parts")
        for part in self.parts:
            part.together = self.parts
        numbers = [0] * len(self.parts)
        self.layers: list[Layer] = []
        for number in self.owner:
            self.layers.append(self.parts[number].layers[numbers[number]])
            numbers[number] += 1

    def see(
        self, x: Tensor, positions: Tensor | None, documents: Tensor | None, n_layer: int
    ) -> Visibility:
        """Raises ``ValueError``: the layers see different keys of ``x``, ``positions`` and
        ``documents`` (B, T)."""
        raise ValueError("the layers of a LayeredCache see different keys: use `see_by_layer`")

    def see_by_layer(
        self,
        x: Tensor,
        positions: Tensor | None,
        documents: Tensor | None,
        windows: Sequence[int | None],
    ) -> list[Visibility]:
        """Which keys the tokens ``x`` (B, T, ...) at ``positions`` (B, T) see, layer by layer.
        Raises ``ValueError`` for another number of layers, for ``documents`` (B, T), and as the
        parts."""
        if len(windows) != len(self.owner):
            raise ValueError(f"the cache has {len(self.owner)} layers, the model {len(windows)}")
        seen = []
        for number, part in enumerate(self.parts):
            own = [w for w, owner in zip(windows, self.owner, strict=True) if owner == number]
            seen.append(iter(part.see_by_layer(x, positions, documents, own)))
        return [next(seen[number]) for number in self.owner]

    @property
    def batch(self) -> int | None:
        """Rows, or ``None`` while the cache is empty."""
        return self.parts[0].batch

    @property
    def length(self) -> int:
        """Tokens in the longest row."""
        return self.parts[0].length

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row, padding not counted, (B,)."""
        return self.parts[0].lengths

    @property
    def nbytes(self) -> int:
        """Bytes held for keys and values, used or not."""
        return sum(part.nbytes for part in self.parts)

    def reset(self) -> None:
        """Forget all tokens."""
        for part in self.parts:
            part.reset()

    def crop(self, length: int | Tensor) -> None:
        """:meth:`KVCache.crop` of all parts, or of none."""
        for part in self.parts:
            part.check_crop(length)  # all of them, before the first is changed
        for part in self.parts:
            part.crop(length)

    def select(self, rows: Tensor) -> None:
        """Keep the given ``rows`` (N,), in that order."""
        for part in self.parts:
            part.select(rows)

    def reorder(self, rows: Tensor) -> None:
        """:meth:`select` of ``rows`` (B,): their number stays."""
        for part in self.parts:
            part.reorder(rows)

    def repeat(self, times: int) -> None:
        """Every row ``times`` times, side by side."""
        for part in self.parts:
            part.repeat(times)

    def __getitem__(self, layer: int) -> NoCache | Layer:
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"layer {layer} is not below the cache's {len(self.layers)} layers")
        return self.layers[layer]


def cache_for(
    windows: Sequence[int | None], codec: Codec = EXACT, reserve: int = 0, slack: int = 0
) -> KVCache | LayeredCache:
    """The smallest cache that loses nothing for a model whose layers have these ``windows``.

    A :class:`GrowingCache` for layers that see everything, a :class:`SlidingCache` for those that
    slide, both where the model has both.
    """
    kinds = sorted(set(windows), key=lambda window: window or 0)
    parts: list[KVCache] = []
    for window in kinds:
        n_layer = list(windows).count(window)
        if window is None:
            parts.append(GrowingCache(n_layer, codec, reserve))
        else:
            parts.append(SlidingCache(n_layer, window, slack, codec))
    return parts[0] if len(parts) == 1 else LayeredCache(parts, [kinds.index(w) for w in windows])
