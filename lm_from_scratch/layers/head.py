"""The head of a language model: from hidden states to a score for every token of the vocabulary."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lm_from_scratch.limits import shown


def columns(x: Tensor, keep: slice | Tensor) -> Tensor:
    """The columns of ``x`` (B, T, C) that are to be scored: a slice of them, or those with these
    indices. Raises ``ValueError`` for anything else."""
    indices = isinstance(keep, Tensor) and keep.dim() == 1 and not keep.is_floating_point()
    if not isinstance(keep, slice) and not indices:
        raise ValueError(f"keep={shown(keep)} must be a slice, or a tensor of indices")
    return x[:, keep]


class Head(nn.Module):
    """Logits (..., V) of hidden states ``x`` (..., C): their product with ``weight`` (V, C).
    ``product`` computes it: an attribute, so that a built model can be given another function. With
    a ``cap`` c a logit z is c tanh(z / c), which stays between -c and c."""

    weight: Tensor
    product: Callable[[Tensor, Tensor], Tensor]
    cap: float | None = None

    def __init__(self, n_embd: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Linear(n_embd, vocab_size, bias=False).weight
        self.product = F.linear

    def forward(self, x: Tensor) -> Tensor:
        logits = self.product(x, self.weight)
        return logits if self.cap is None else self.cap * (logits / self.cap).tanh()

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}"


class TiedHead(Head):
    """A head that *is* the token embedding of a ``backbone``, used the other way round: there is no
    second matrix that loading, replacing or moving a weight could separate from the first."""

    def __init__(self, backbone: Any) -> None:
        nn.Module.__init__(self)
        self.tied_to = (backbone,)  # in a tuple, where torch does not look for parameters
        self.product = F.linear

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """(V, C): what the embedding's weight is now."""
        return self.tied_to[0].embedding.weight
