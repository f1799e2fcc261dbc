"""Losses of classifiers: a number, one label of several, several labels, a label for each token.

Low-precision logits are cast up to float32 in all of them, and a loss to which nothing contributes
is 0, not NaN. Shapes: B rows, T tokens, n labels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.cache.interface import check_integers
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training.loss import causal_lm_loss
from lm_from_scratch.training.objective import Objective, autocast


def regression_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean squared error of ``logits`` (B, n) and ``labels`` (B, n), or (B,) where n is 1."""
    if logits.shape[-1] == 1 and labels.shape == logits.shape[:-1]:
        labels = labels[..., None]
    check_shape("labels", labels, logits.shape)
    work = torch.promote_types(logits.dtype, torch.float32)
    total = F.mse_loss(logits.to(work), labels.to(work), reduction="sum")
    return total / max(labels.numel(), 1)


def single_label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of ``logits`` (B, n) and class numbers ``labels`` (B,); -100 does not
    count."""
    check_shape("labels", labels, logits.shape[:-1])
    if labels.is_floating_point():
        raise ValueError(f"labels have dtype {labels.dtype}; class numbers must be integers")
    labels = labels.long()
    check_range(labels[labels != IGNORE], logits.shape[-1] - 1)
    return causal_lm_loss(logits, labels)


def multi_label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean binary cross-entropy of ``logits`` (B, n) and, for each of the ``labels`` (B, n), how
    true it is, from 0 to 1."""
    check_shape("labels", labels, logits.shape)
    check_range(labels, 1)
    work = torch.promote_types(logits.dtype, torch.float32)
    total = F.binary_cross_entropy_with_logits(logits.to(work), labels.to(work), reduction="sum")
    return total / max(labels.numel(), 1)


#: The losses by their name in a checkpoint's ``config.json``.
LOSSES = {
    "regression": regression_loss,
    "single_label_classification": single_label_loss,
    "multi_label_classification": multi_label_loss,
}


def problem_type_of(logits: Tensor, labels: Tensor) -> str:
    """What ``labels`` (B,) or (B, n) look like beside ``logits`` (B, n): one logit is a regression,
    a whole number for each row a class, anything else a mark for each label."""
    if logits.shape[-1] == 1:
        return "regression"
    if not labels.is_floating_point() and labels.shape == logits.shape[:-1]:
        return "single_label_classification"
    return "multi_label_classification"


def classification_loss(logits: Tensor, labels: Tensor, problem_type: str | None = None) -> Tensor:
    """The loss of ``logits`` (B, n) and ``labels`` (B,) or (B, n) called ``problem_type``; without
    one, that which the labels look like.

    The choice is made for these labels alone and stored nowhere. Raises ``ValueError`` for an
    unknown name, and as the losses.
    """
    if problem_type is None:
        problem_type = problem_type_of(logits, labels)
    if problem_type not in LOSSES:
        raise ValueError(f"problem_type={problem_type!r} is not one of {sorted(LOSSES)}")
    return LOSSES[problem_type](logits, labels)


def token_classification_loss(
    logits: Tensor, labels: Tensor, *, positions: Tensor | None = None
) -> Tensor:
    """Mean cross-entropy of ``logits`` (B, T, n) and class numbers ``labels`` (B, T).

    -100 does not count, and neither does padding, where ``positions`` (B, T) are -1, whatever its
    label.
    """
    if positions is None:
        return single_label_loss(logits, labels)
    check_shape("labels", labels, logits.shape[:-1])
    check_integers("positions", positions, labels)
    real = positions >= 0
    return single_label_loss(logits[real], labels[real])


class LabelLoss(Objective):
    """The loss of a model that gives each text one label."""

    def forward(
        self,
        idx: Tensor,
        targets: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """The mean loss over the ``targets`` (B,) of the texts ``idx``, at ``positions`` (B, T);
        ``documents`` (B, T) are no part of such a batch: None."""
        with autocast(idx.device, self.dtype):
            return causal_lm_loss(self.model(idx, positions=positions), targets)


# -------------------------------------------------------------------------------------- checks


def check_shape(name: str, tensor: Tensor, shape: torch.Size) -> None:
    """Raises ``ValueError`` for another shape."""
    if tensor.shape != shape:
        raise ValueError(f"{name} have shape {tuple(tensor.shape)}; it must be {tuple(shape)}")


def check_range(labels: Tensor, most: int) -> None:
    """Raises ``ValueError`` for labels outside 0, ..., ``most``, NaN among them."""
    if labels.numel() == 0:
        return
    low, high = labels.min().item(), labels.max().item()
    if not (low >= 0 and high <= most):
        raise ValueError(f"labels run from {low} to {high}; they must be from 0 to {most}")
