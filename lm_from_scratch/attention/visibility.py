r"""Which keys a query may see: one rule, from positions.

Every token carries one integer, its **position**: where it stands in its own sequence, -1 for
padding. One sentence then makes every mask: *a key is visible if it is real, not after the query,
within the window, and in the same document.* Causal masks, left and right padding, chunks after a
cache, sliding windows and packed documents are all this sentence.

A window of W keys includes the query's own: positions :math:`t - W + 1, \dots, t`.

Shapes: B batch, T queries, S keys.

Source of packing without a view of other documents: Krell et al., *Efficient Sequence Packing
without Cross-contamination*, 2021, arXiv:2107.02027.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

PADDING = -1  # the position of a token that is not there


def plain(known: bool) -> bool:
    """True or False itself, also while a compiler traces lengths that are symbols: it then decides,
    and notes for which lengths (``bool`` would keep the symbol)."""
    return True if known else False  # noqa: SIM210


@dataclass(eq=False)
class Visibility:
    """Which keys each query may see.

    ``dense`` says what is known *without looking at the positions*: no token is padding, all are in
    one document, and key ``s`` stands at position ``s``, the queries being the last T of the S
    keys. The fast paths of attention are chosen from it alone, so that no tensor value is read for
    it (reading one would make a GPU wait, and a compiled graph break).

    Positions alone do not separate documents: two that are packed into one row both have a token at
    position 0, and see each other unless their document numbers differ.
    """

    query_positions: Tensor  # (B, T), or (1, T) where all rows are alike
    key_positions: Tensor  # (B, S) or (1, S)
    query_documents: Tensor | None = None  # (B, T)
    key_documents: Tensor | None = None  # (B, S)
    window: int | None = None  # keys that a query sees, its own included
    dense: bool = False
    allowed: Tensor | None = None  # (B or 1, 1, T, S): what else must be True
    _mask: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1: a query sees its own key")
        if (self.query_documents is None) != (self.key_documents is None):
            raise ValueError("documents are needed for both queries and keys, or for neither")
        if self.allowed is not None:
            shape = (1, self.query_length, self.key_length)
            if self.allowed.dtype != torch.bool or self.allowed.shape[1:] != shape:
                raise ValueError(
                    f"allowed is {self.allowed.dtype} of shape {tuple(self.allowed.shape)}; it "
                    f"must be bool of shape (batch, *{shape}), True where a key may be seen"
                )
            self.dense = False  # what it hides is not known without looking

    @property
    def mask(self) -> Tensor:
        """The rule as a tensor (B, 1, T, S), True where the key is visible; made once."""
        if self._mask is None:
            self._mask = self.rule()
        return self._mask

    def rule(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Real, not after the query, within the window, in the same document: (B, 1, T, S), or the
        part of it that belongs to some of the queries and keys."""
        query = self.query_positions[:, None, queries, None]  # (B, 1, T, 1)
        key = self.key_positions[:, None, None, keys]  # (B, 1, 1, S)
        mask = (key >= 0) & (key <= query)
        if self.window is not None:
            mask = mask & (key > query - self.window)
        if self.query_documents is not None and self.key_documents is not None:
            query_document = self.query_documents[:, None, queries, None]
            mask = mask & (query_document == self.key_documents[:, None, None, keys])
        if self.allowed is not None:
            mask = mask & self.allowed[:, :, queries, keys]
        return mask

    def within(self, window: int | None) -> "Visibility":
        """The same tokens seen through a sliding window of that many keys."""
        return self if window == self.window else replace(self, window=window)

    @property
    def hides_only_the_future(self) -> bool:
        """Known: nothing is padding, all is one document, and no key is too old for the window."""
        return plain(self.dense and (self.window is None or self.window >= self.key_length))

    @property
    def is_causal(self) -> bool:
        """Known to be the plain lower triangle: as many queries as keys, nothing else hidden."""
        return plain(self.hides_only_the_future and self.query_length == self.key_length)

    @property
    def is_full(self) -> bool:
        """Known to hide nothing: the one query is the last token."""
        return plain(self.hides_only_the_future and self.query_length == 1)

    @property
    def query_length(self) -> int:
        """T."""
        return self.query_positions.shape[1]

    @property
    def key_length(self) -> int:
        """S."""
        return self.key_positions.shape[1]
