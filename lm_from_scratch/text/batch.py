"""A batch: token ids, the target of each, and where every token stands in its document."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lm_from_scratch.attention.visibility import PADDING
from lm_from_scratch.limits import Count, require
from lm_from_scratch.text.targets import IGNORE, next_token_targets


@dataclass(frozen=True)
class Batch:
    """Token ids and the token after each, both (B, T); -100 where no target counts.

    ``positions`` and ``documents`` are as the models take them; both are ``None`` if every row is
    one unbroken run of tokens.
    """

    idx: Tensor
    targets: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None

    @property
    def count(self) -> int:
        """How many things the loss of the batch is a mean over: its targets."""
        return int((self.targets != IGNORE).sum())

    @property
    def reward(self) -> float | None:
        """The mean reward of what the model wrote, where it was judged."""
        return None

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        moved: dict[str, Any] = {k: t if t is None else t.to(device) for k, t in vars(self).items()}
        return type(self)(**moved)


def padded_batch(
    sequences: Sequence[Sequence[int]],
    pad_token_id: int,
    side: str = "right",
    block_size: int | None = None,
) -> Batch:
    """Sequences of unequal length in one batch, padded on the left or on the right.

    With a ``block_size`` every sequence is cut to its first ``block_size`` tokens. Raises
    ``ValueError`` for an empty sequence, and for another side.
    """
    if block_size is not None:
        require(Count, block_size=block_size)
    sequences = [sequence[:block_size] for sequence in sequences]
    if side not in ("left", "right"):
        raise ValueError(f"side={side!r} must be 'left' or 'right'")
    if not sequences or any(len(sequence) == 0 for sequence in sequences):
        raise ValueError("every sequence needs at least one token")
    T = max(len(sequence) for sequence in sequences)
    idx = torch.full((len(sequences), T), pad_token_id)
    positions = torch.full((len(sequences), T), PADDING)
    for row, sequence in enumerate(sequences):
        n = len(sequence)
        columns = slice(T - n, T) if side == "left" else slice(0, n)
        idx[row, columns] = torch.tensor(sequence)
        positions[row, columns] = torch.arange(n)
    return Batch(idx, next_token_targets(idx, positions=positions), positions)
