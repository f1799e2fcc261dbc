r"""Classification heads: one linear map over the states of a model that reads text.

In a causal model only the last token has seen the whole sequence, so its state is what a sequence
is classified by. A :class:`TokenClassifier` labels every token instead. Both take the model without
its language-model head, the *backbone*, and hold it under the name that it has in published
checkpoints (``transformer`` in GPT-2, ``model`` in Qwen2), so that weights load by name.

What is padding is read from the positions, here as everywhere, and never from the token ids: the
padding token may be a token of the text as well.

The losses are functions. Low-precision logits are cast up to float32 in all of them, and a loss to
which nothing contributes is 0, not NaN.

Source: Radford et al., *Improving Language Understanding by Generative Pre-Training*, 2018, which
classifies by the state of the last token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_from_scratch.cache import NO_CACHE, Cache, check_positions
from lm_from_scratch.loss import causal_lm_loss
from lm_from_scratch.models.gpt2 import GPT2Model
from lm_from_scratch.models.qwen2 import Qwen2Model
from lm_from_scratch.text.targets import IGNORE

Backbone = GPT2Model | Qwen2Model


class Classifier(nn.Module):
    """A backbone, and the linear map ``score`` from its states to one logit for each label.

    Raises ``ValueError`` for no labels, and for a model with a head.
    """

    def __init__(self, backbone: Backbone, n_labels: int, bias: bool) -> None:
        super().__init__()
        if type(n_labels) is not int or n_labels < 1:
            raise ValueError(f"n_labels={n_labels!r} must be an integer, at least 1")
        if not hasattr(backbone, "prefix"):
            raise ValueError(f"{type(backbone).__name__} is no backbone: give its `backbone`")
        self.prefix = backbone.prefix
        self.add_module(self.prefix, backbone)
        like = next(backbone.parameters())
        self.score = nn.Linear(
            backbone.config.n_embd, n_labels, bias, device=like.device, dtype=like.dtype
        )
        nn.init.normal_(self.score.weight, std=backbone.config.initializer_range)
        if bias:
            nn.init.zeros_(self.score.bias)

    @property
    def backbone(self) -> Backbone:
        """The model without its head, under its name of the checkpoint."""
        return getattr(self, self.prefix)


class SequenceClassifier(Classifier):
    """Logits (B, n_labels) of ``idx`` (B, T) at ``positions`` (B, T): what is this sequence?"""

    def __init__(self, backbone: Backbone, n_labels: int) -> None:
        super().__init__(backbone, n_labels, bias=False)

    def forward(
        self, idx: Tensor, positions: Tensor | None = None, cache: Cache = NO_CACHE
    ) -> Tensor:
        return self.classify(self.backbone(idx, positions, None, cache), positions)

    def classify(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits (B, n_labels) from hidden states ``x`` (B, T, C) at ``positions`` (B, T), wherever
        these come from."""
        return self.score(last_token(x, positions))


class TokenClassifier(Classifier):
    """Logits (B, T, n_labels) of ``idx``, at ``positions`` and in ``documents`` (B, T): what is
    this token? It knows the tokens before, not those after."""

    def __init__(self, backbone: Backbone, n_labels: int, dropout: float = 0.1) -> None:
        super().__init__(backbone, n_labels, bias=True)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        idx: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache = NO_CACHE,
    ) -> Tensor:
        return self.classify(self.backbone(idx, positions, documents, cache))

    def classify(self, x: Tensor) -> Tensor:
        """Logits (B, T, n_labels) from hidden states ``x`` (B, T, C), wherever these come from."""
        return self.score(self.dropout(x))


def last_token(x: Tensor, positions: Tensor | None = None) -> Tensor:
    """The states (B, C) of the last real token of each row of ``x`` (B, T, C) at ``positions``
    (B, T).

    Without ``positions`` no token is padding, and the last column is taken. A row that is all
    padding has no last token: column 0 is taken, which means nothing. Raises ``ValueError`` for
    positions of another shape.
    """
    if positions is None:
        return x[:, -1]
    check_positions(positions, x)
    B, T = positions.shape
    columns = torch.arange(T, device=x.device)
    last = torch.where(positions >= 0, columns, 0).amax(dim=1)  # (B,)
    return x[torch.arange(B, device=x.device), last]


# -------------------------------------------------------------------------------------- losses


def regression_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean squared error of ``logits`` (B, n) and ``labels`` (B, n), or (B,) where n is 1. Raises
    ``ValueError`` for others."""
    if logits.shape[-1] == 1 and labels.shape == logits.shape[:-1]:
        labels = labels[..., None]
    check_shape("labels", labels, logits.shape)
    work = torch.promote_types(logits.dtype, torch.float32)
    total = F.mse_loss(logits.to(work), labels.to(work), reduction="sum")
    return total / max(labels.numel(), 1)


def single_label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of ``logits`` (B, n) and class numbers ``labels`` (B,); -100 does not
    count. Raises ``ValueError`` for other shapes and numbers."""
    check_shape("labels", labels, logits.shape[:-1])
    if labels.is_floating_point():
        raise ValueError(f"labels have dtype {labels.dtype}; class numbers must be integers")
    labels = labels.long()
    check_range(labels[labels != IGNORE], logits.shape[-1] - 1)
    return causal_lm_loss(logits, labels)


def multi_label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean binary cross-entropy of ``logits`` (B, n) and, for each of the ``labels`` (B, n), how
    true it is. Raises ``ValueError`` outside 0 to 1, and for other shapes."""
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
    logits: Tensor, labels: Tensor, positions: Tensor | None = None
) -> Tensor:
    """Mean cross-entropy of ``logits`` (B, T, n) and class numbers ``labels`` (B, T).

    -100 does not count, and neither does padding, where ``positions`` (B, T) are -1, whatever its
    label. Raises ``ValueError`` for other shapes and numbers.
    """
    if positions is None:
        return single_label_loss(logits, labels)
    check_shape("labels", labels, logits.shape[:-1])
    check_positions(positions, labels)
    real = positions >= 0
    return single_label_loss(logits[real], labels[real])


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
