"""What all layers are that carry a state instead of keys, or beside them: by this type they are
found in a built model."""

from abc import abstractmethod

from torch import Tensor, nn


class RecurrentLayer(nn.Module):
    """A layer that carries a state from token to token; keys, if there are any, are another's."""

    @abstractmethod
    def initial_state(self, x: Tensor) -> tuple[Tensor, ...]:
        """The tensors (B, ...) before the first token of ``x`` (B, T, C)."""
