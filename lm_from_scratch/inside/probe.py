"""A linear probe: can something be read off a layer's activations with one matrix?

A probe is a classifier with nothing but a matrix and a bias. What it finds on examples that it was
not fitted on is *there*, in a form that the next layer could use. Whether the model uses it is
another question; and a probe of a random model says how much is in the words alone.

Source: Alain, Bengio, *Understanding intermediate layers using linear classifier probes*, 2016,
arXiv:1610.01644.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.inside.sites import wide
from lm_from_scratch.limits import Count, Positive, require


@dataclass(frozen=True)
class Probe:
    """Scores of K classes from a state of C features: ``(x - mean) / scale @ weight + bias``."""

    mean: Tensor  # (C,)
    scale: Tensor  # (C,)
    weight: Tensor  # (C, K)
    bias: Tensor  # (K,)

    def __call__(self, x: Tensor) -> Tensor:
        """The scores (N, K) of states (N, C)."""
        return (x - self.mean) / self.scale @ self.weight + self.bias

    def accuracy(self, x: Tensor, y: Tensor) -> float:
        """The share of the states ``x`` (N, C) whose class ``y`` (N,) has the highest score."""
        return (self(x).argmax(-1) == y).double().mean().item()


def fit_probe(x: Tensor, y: Tensor, n_classes: int, decay: float = 1e-3, steps: int = 100) -> Probe:
    """The probe with the least mean cross-entropy plus ``decay / 2`` times the squared weights, for
    states ``x`` (N, C) and their classes ``y`` (N,): one minimum, found by L-BFGS from zeros.

    Raises ``ValueError`` for shapes and classes that do not fit.
    """
    require(Count, n_classes=n_classes, steps=steps)
    require(Positive, decay=decay)
    if x.dim() != 2 or y.shape != x.shape[:1] or not len(y):
        raise ValueError(f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}, not (N, C), (N,)")
    if not 0 <= int(y.min()) <= int(y.max()) < n_classes:
        raise ValueError(f"y holds {y.min()} ... {y.max()}, not 0 ... {n_classes - 1}")
    x = wide(x)
    mean, scale = x.mean(0), x.std(0, correction=0).clamp(min=1e-6)
    z = (x - mean) / scale
    weight = x.new_zeros(x.shape[1], n_classes).requires_grad_(True)
    bias = x.new_zeros(n_classes).requires_grad_(True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=steps, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(z @ weight + bias, y) + decay / 2 * weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(loss)
    return Probe(mean, scale, weight.detach(), bias.detach())
