"""What a model begins with: the rows of a table that token ids name, or vectors that are given."""

import torch
from torch import Tensor, nn


def embedded(idx: Tensor, table: nn.Embedding) -> Tensor:
    """Embeddings (B, T, C): those in ``table`` of the token ids ``idx`` (B, T), or ``idx`` itself
    where it holds embeddings (B, T, C) already. Raises ``ValueError`` for other shapes, and for
    what are no ids of the table. (Of ids on a GPU, it is known later, and torch says it.)"""
    if not isinstance(idx, Tensor):
        raise ValueError(f"idx is a {type(idx).__name__}; it must be a tensor (batch, tokens)")
    C, given = table.embedding_dim, idx.is_floating_point()
    if idx.dim() != 2 + given or (given and idx.shape[2] != C):
        raise ValueError(
            f"idx has shape {tuple(idx.shape)}; it must be (batch, tokens), of embeddings "
            f"(batch, tokens, n_embd={C})"
        )
    if given:
        return idx
    if idx.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"idx has dtype {idx.dtype}; token ids are torch.int64 or torch.int32")
    try:
        return table(idx)
    except IndexError as error:
        raise ValueError(
            f"idx holds {int(idx.min())} ... {int(idx.max())}; the tokens of the model are 0 ... "
            f"{table.num_embeddings - 1}"
        ) from error
