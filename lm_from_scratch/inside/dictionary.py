r"""A dictionary of features: a sparse autoencoder over the states of a model.

A state of C numbers seems to hold far more than C things, none on an axis of its own. The guess
behind a dictionary: it is a sum of a *few* out of many directions, and each direction is one thing.

.. math::

   f = \mathrm{top}_k\left(\max(0,\, (x - b)\, W + a)\right), \qquad \hat x = f D + b

For a state x, W and a say how active each of the F features is, all but the k largest become 0, and
the rows of D, of length 1, are the directions that are added up again. It is fitted to give x back;
that the features mean something is not asked of it, and has to be tested (:func:`match`).

Sources: Makhzani, Frey, *k-Sparse Autoencoders*, 2013, arXiv:1312.5663 (the k largest in place of
a penalty); Bricken et al., *Towards Monosemanticity*, 2023; Gao et al., *Scaling and Evaluating
Sparse Autoencoders*, 2024, arXiv:2406.04093 (both together, with a second loss against dead
features, which is left out here).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_from_scratch.inside.sites import wide
from lm_from_scratch.limits import Count, Positive, require


class Dictionary(nn.Module):
    """``n_features`` directions in a space of ``n_embd`` features, ``k`` of them for a state."""

    def __init__(self, n_embd: int, n_features: int, k: int) -> None:
        super().__init__()
        require(Count, n_embd=n_embd, n_features=n_features, k=k)
        if k > n_features:
            raise ValueError(f"k={k} of n_features={n_features} features cannot be active")
        self.k = k
        directions = F.normalize(torch.randn(n_features, n_embd), dim=-1)
        self.directions = nn.Parameter(directions)  # (F, C)
        self.encoder = nn.Parameter(directions.T.clone())  # (C, F)
        self.threshold = nn.Parameter(torch.zeros(n_features))
        self.centre = nn.Parameter(torch.zeros(n_embd))

    def encode(self, x: Tensor) -> Tensor:
        """How active the features (..., F) of states ``x`` (..., C) are; at most k are not 0."""
        active = ((x - self.centre) @ self.encoder + self.threshold).relu()
        values, which = active.topk(self.k, dim=-1)
        return torch.zeros_like(active).scatter(-1, which, values)

    def decode(self, f: Tensor) -> Tensor:
        """The states (..., C) that features ``f`` (..., F) stand for."""
        return f @ self.directions + self.centre

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def unexplained(self, x: Tensor) -> float:
        """The share of the variance of ``x`` (N, C) that is not given back: 0 is all."""
        return ((self(x) - x).square().sum() / (x - x.mean(0)).square().sum()).item()


def fit_dictionary(
    x: Tensor, n_features: int, k: int, steps: int = 500, rows: int = 512, lr: float = 3e-3,
    seed: int = 0,
) -> Dictionary:  # fmt: skip
    """A dictionary that gives the states ``x`` (N, C) back as well as it can, by Adam on ``rows``
    of them at a time."""
    require(Count, steps=steps, rows=rows)
    require(Positive, lr=lr)
    x = wide(x)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        found = Dictionary(x.shape[1], n_features, k).to(x)
        found.centre.data.copy_(x.mean(0))
        scale = (x - x.mean(0)).square().mean()
        optimizer = torch.optim.Adam(found.parameters(), lr=lr)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        for _ in range(steps):
            batch = x[torch.randint(len(x), (rows,))]
            loss = (found(batch) - batch).square().mean() / scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                found.directions.copy_(F.normalize(found.directions, dim=-1))
    return found.requires_grad_(False)


class Matches(NamedTuple):
    """Of each of M facts: the feature that says it best, and how well."""

    feature: Tensor  # (M,)
    score: Tensor  # (M,) F1, from 0 to 1
    dead: int  # features that no state activates


def match(features: Tensor, facts: Tensor) -> Matches:
    """Which of the ``features`` (N, F) of N states says each of the ``facts`` (N, M), true or
    false: is it active exactly where the fact is true? The score is F1, the harmonic mean of
    precision (how often the fact is true where the feature is active) and recall."""
    active = (features > 0).to(torch.float32)
    true = facts.to(torch.float32)
    both = active.T @ true  # (F, M)
    score = 2 * both / (active.sum(0)[:, None] + true.sum(0)).clamp(min=1)
    best = score.max(0)
    return Matches(best.indices, best.values, int((active.sum(0) == 0).sum()))
