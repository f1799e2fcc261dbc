r"""Classification heads: one linear map over the states of a model that reads text.

In a causal model only the last token has seen the whole sequence, so its state is what a sequence
is classified by. A :class:`TokenClassifier` labels every token instead. Both take the model without
its language-model head, the *backbone*, and hold it under the name that it has in published
checkpoints (``transformer`` in GPT-2, ``model`` in Qwen2), so that weights load by name.

What is padding is read from the positions, here as everywhere. One thing more is known of a
sequence: where its config names a ``pad_token_id``, the last token that is not that one counts.
``transformers`` has no other way to find it, so a published classifier was trained like that, also
where the token that pads ends every text.

The losses are functions of their own: :mod:`~lm_from_scratch.training.classification_loss`.

Source: Radford et al., *Improving Language Understanding by Generative Pre-Training*, 2018, which
classifies by the state of the last token.
"""

import torch
from torch import Tensor, nn

from lm_from_scratch.cache.interface import NO_CACHE, Cache, check_integers
from lm_from_scratch.models.gpt2 import GPT2Model
from lm_from_scratch.models.qwen2 import Qwen2Model

Backbone = GPT2Model | Qwen2Model


class Classifier(nn.Module):
    """A backbone, and the linear map ``score`` from its states to one logit for each label."""

    def __init__(self, backbone: Backbone, n_labels: int, bias: bool) -> None:
        super().__init__()
        if type(n_labels) is not int or n_labels < 1:
            raise ValueError(f"n_labels={n_labels!r} must be an integer, at least 1")
        if not isinstance(backbone, Backbone):
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
    """Logits (B, n_labels) of ``idx`` (B, T) at ``positions`` (B, T): what is this sequence? It is
    read off the last token that is not the ``pad_token_id`` of the config."""

    def __init__(self, backbone: Backbone, n_labels: int) -> None:
        super().__init__(backbone, n_labels, bias=False)

    def forward(
        self, idx: Tensor, *, positions: Tensor | None = None, cache: Cache = NO_CACHE
    ) -> Tensor:
        x = self.backbone(idx, positions=positions, cache=cache)
        pad = self.backbone.config.pad_token_id
        if pad is not None and not idx.is_floating_point():  # embeddings have no ids
            places = torch.zeros_like(idx) if positions is None else positions
            positions = places.masked_fill(idx == pad, -1)
        return self.classify(x, positions=positions)

    def classify(self, x: Tensor, *, positions: Tensor | None = None) -> Tensor:
        """Logits (B, n_labels) from hidden states ``x`` (B, T, C) at ``positions`` (B, T), wherever
        these come from."""
        return self.score(last_token(x, positions=positions))


class TokenClassifier(Classifier):
    """Logits (B, T, n_labels) of ``idx``, at ``positions`` and in ``documents`` (B, T): what is
    this token? It knows the tokens before, not those after."""

    def __init__(self, backbone: Backbone, n_labels: int, dropout: float = 0.1) -> None:
        super().__init__(backbone, n_labels, bias=True)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        idx: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache = NO_CACHE,
    ) -> Tensor:
        return self.classify(
            self.backbone(idx, positions=positions, documents=documents, cache=cache)
        )

    def classify(self, x: Tensor) -> Tensor:
        """Logits (B, T, n_labels) from hidden states ``x`` (B, T, C), wherever these come from."""
        return self.score(self.dropout(x))


def last_token(x: Tensor, *, positions: Tensor | None = None) -> Tensor:
    """The states (B, C) of the last real token of each row of ``x`` (B, T, C) at ``positions``
    (B, T).

    Without ``positions`` no token is padding, and the last column is taken. A row that is all
    padding has no last token: column 0 is taken, which means nothing.
    """
    if positions is None:
        return x[:, -1]
    check_integers("positions", positions, x)
    B, T = positions.shape
    columns = torch.arange(T, device=x.device)
    last = torch.where(positions >= 0, columns, 0).amax(dim=1)  # (B,)
    return x[torch.arange(B, device=x.device), last]
