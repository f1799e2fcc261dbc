"""Optimizers: AdamW, GaLore, and steps inside the backward pass."""

from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.optim.in_backward import update_in_backward

__all__ = ["AdamW", "GaLore", "update_in_backward"]
