r"""How probable a model finds what was said: the number that all training after pretraining moves.

.. math::

   \log p(y \mid x) = \sum_{t} \log p(y_t \mid x, y_{<t})

for the answer y to a prompt x. A product of probabilities is a sum of logarithms, so a long answer
is less probable than a short one, other things being equal. Where a target is -100, as all targets
within a prompt are, the token was given, not said, and counts nothing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.text.targets import IGNORE


def token_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """The log-probability of each of the ``targets`` (B, T) by ``logits`` (B, T, V): (B, T), in
    nats, 0 where the target is -100.

    They are computed in float32 at least. A token that the logits exclude with -inf has -inf.
    Raises ``ValueError`` for other shapes, and for targets outside the vocabulary.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}, targets {tuple(targets.shape)}; "
            "all but the last dimension of the logits must agree"
        )
    V, counted = logits.shape[-1], targets[targets != IGNORE]
    if len(counted) and not 0 <= counted.min() <= counted.max() < V:
        raise ValueError(
            f"targets run from {counted.min()} to {counted.max()}; they must be in 0 ... {V - 1}, "
            f"or {IGNORE}"
        )
    surprise = F.cross_entropy(
        logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32)),
        targets.flatten().long(),
        ignore_index=IGNORE,
        reduction="none",
    )
    return -surprise.view_as(targets)


def sequence_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """The log-probability of all ``targets`` (B, T) of a row together, by ``logits`` (B, T, V): the
    sums (B,) of :func:`token_log_probs`."""
    return token_log_probs(logits, targets).sum(dim=-1)
