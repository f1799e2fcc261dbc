"""What a model begins with: the rows of a table that token ids name, or vectors that are given."""

from torch import Tensor, nn


def embedded(idx: Tensor, table: nn.Embedding) -> Tensor:
    """Embeddings (B, T, C): those in ``table`` of the token ids ``idx`` (B, T), or ``idx`` itself
    where it holds embeddings (B, T, C) already. Raises ``ValueError`` for other shapes."""
    C, given = table.embedding_dim, idx.is_floating_point()
    if idx.dim() != 2 + given or (given and idx.shape[2] != C):
        raise ValueError(
            f"idx has shape {tuple(idx.shape)}; it must be (batch, tokens), of embeddings "
            f"(batch, tokens, n_embd={C})"
        )
    return idx if given else table(idx)
