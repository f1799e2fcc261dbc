"""A vocabulary of another size: rows added to the token embedding of a built model, or cut off."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lm_from_scratch.layers.head import TiedHead
from lm_from_scratch.limits import Count, require
from lm_from_scratch.models.heads import Classifier
from lm_from_scratch.models.interface import CausalLM


@torch.no_grad()
def resize_token_embeddings_(model: CausalLM | Classifier, vocab_size: int) -> None:
    """Give a built model ``vocab_size`` tokens. Those that were there keep their rows; new ones get
    fresh random numbers, as at the beginning of training.

    A tied head stays tied, an untied one is resized too. The parameters are new objects: build the
    optimizer afterwards. Raises ``ValueError`` before anything has changed, also for weights that
    are quantised, and where the config names a token that would be cut off.
    """
    require(Count, vocab_size=vocab_size)
    config: Any = replace(model.backbone.config, vocab_size=vocab_size)
    tables: list[Any] = [model.backbone.embedding]
    if hasattr(model.backbone, "embed_tokens_per_layer"):  # as wide as the layers are told
        tables.append(model.backbone.embed_tokens_per_layer)
        config = replace(config, per_layer_vocab_size=vocab_size)
    if isinstance(model, CausalLM) and not isinstance(model.head, TiedHead):
        tables.append(model.head)
    for table in tables:
        if type(table.weight) is not nn.Parameter:
            raise ValueError(f"the embedding is a {type(table.weight).__name__}: resize it before")
    for table in tables:
        old = table.weight
        new = torch.empty(vocab_size, old.shape[1], dtype=old.dtype, device=old.device)
        new.normal_(0.0, config.initializer_range)
        rows = min(vocab_size, len(old))
        new[:rows] = old[:rows]
        table.weight = nn.Parameter(new, requires_grad=old.requires_grad)
        if isinstance(table, nn.Embedding):
            table.num_embeddings = vocab_size
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = config
