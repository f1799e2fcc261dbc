"""What a language model is to those who train it, ask it or change it.

Everything outside this folder knows a model by this file, and no architecture by name.
"""

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn

from lm_from_scratch.cache.interface import NO_CACHE, Cache
from lm_from_scratch.layers.head import Head


class CausalLM(nn.Module):
    """Token ids in, logits out: a ``backbone`` that ends with the hidden states (B, T, C), and a
    ``head`` that turns them into logits (B, T, V)."""

    config: Any
    lm_head: Head

    @property
    def head(self) -> Head:
        """What turns hidden states into logits, under its name of the checkpoint."""
        return self.lm_head

    @property
    @abstractmethod
    def backbone(self) -> Any:
        """The model without its head."""

    @abstractmethod
    def forward(
        self,
        idx: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache = NO_CACHE,
        keep: slice | Tensor = slice(None),
    ) -> Tensor:
        """Logits (B, T, V) of the token ids ``idx`` at ``positions`` and in ``documents`` (B, T),
        for the columns that ``keep`` chooses. All but the ids go by name, so that a mask of 0s and
        1s, which is second elsewhere, is not taken for positions
        (:func:`~lm_from_scratch.attention.masks.positions_from_mask` makes them of it)."""
