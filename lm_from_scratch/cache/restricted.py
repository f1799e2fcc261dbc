"""A view of another cache in which fewer keys can be seen."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import Cache, LayerCache


class Restricted(Cache):
    """Another cache, with fewer visible keys: those for which ``allowed`` is True as well.

    ``allowed`` (B or 1, 1, T, S) is for the one forward pass of T tokens that it is passed to. It
    serves what positions cannot say: a tree of drafts, or a prefix that is read in blocks::

        model(idx, cache=Restricted(NO_CACHE, allowed))

    Its S columns are the keys in the order in which the other cache returns them.
    """

    def __init__(self, cache: Cache, allowed: Tensor) -> None:
        self.cache, self.allowed = cache, allowed

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
        siblings: bool = True,
    ) -> list[Visibility]:
        seen = self.cache.see(x, positions, documents, windows, siblings=siblings)
        # layers that share one visibility still do
        restricted = {id(visibility): self._restrict(visibility) for visibility in seen}
        return [restricted[id(visibility)] for visibility in seen]

    def _restrict(self, visibility: Visibility) -> Visibility:
        others = visibility.allowed
        return replace(
            visibility, allowed=self.allowed if others is None else others & self.allowed
        )

    def __getitem__(self, layer: int) -> LayerCache:
        return RestrictedLayer(self.cache[layer])


class RestrictedLayer:
    """A layer of the other cache, whose keys are all there. A state holds everything that was read,
    and no mask can take a part of it away: a recurrent layer is refused."""

    def __init__(self, layer: LayerCache) -> None:
        self.update = layer.update

    def state(self, *initial: Tensor) -> tuple[Tensor, ...]:
        """Raises ``ValueError``, whatever the ``initial`` tensors (B, ...) are."""
        raise ValueError("a mask cannot restrict a recurrent layer: its state holds all tokens")

    def keep(self, *state: Tensor) -> None:
        """Raises ``ValueError``, whatever the tensors (B, ...) are."""
        self.state()

    note = keep
