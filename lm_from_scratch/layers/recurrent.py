"""A layer in the place of attention, as whoever uses a built model finds it."""

from abc import abstractmethod

from torch import Tensor, nn


class RecurrentLayer(nn.Module):
    """A layer that carries a state from token to token, and has no keys."""

    @abstractmethod
    def initial_state(self, x: Tensor) -> tuple[Tensor, ...]:
        """The tensors (B, ...) before the first token of ``x`` (B, T, C)."""
