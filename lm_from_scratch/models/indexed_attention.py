"""The indexer as a module, and an attention layer that reads what it chooses.

The mathematics is in :mod:`lm_from_scratch.attention.indexer`. Submodules carry the names of
DeepSeek-V3.2 (``wq_b``, ``wk``, ``k_norm``, ``weights_proj``), so its weights load by name. Left
out is what that model does for speed: it turns queries and keys of the indexer by one orthogonal
matrix, which changes no product, and rounds them to 8 bits.

Shapes: B batch, T tokens, S keys, C features of a token, R features of the query's latent, J heads
of the indexer, D features of each.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lm_from_scratch.attention.indexer import choose, index_scores, restrict
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import NO_CACHE, LayerCache
from lm_from_scratch.layers.layer_norm import LayerNorm
from lm_from_scratch.layers.rope import apply_rope
from lm_from_scratch.limits import Count, require
from lm_from_scratch.models.blocks import blocks


class Indexer(nn.Module):
    """Chooses ``count`` keys for each query of ``x`` (B, T, C).

    Its queries are made of ``latent`` (B, T, R), the query's latent in a model that has one, else
    of ``x`` itself (R = C). The first features of each head are turned to their position, as many
    as the rotation has. What comes in is detached: no loss of the indexer reaches the model.

    Raises ``ValueError`` for sizes below 1, and for a rotation of more features than a head has.
    """

    def __init__(
        self, n_embd: int, n_head: int, head_dim: int, count: int, q_rank: int | None = None
    ) -> None:
        super().__init__()
        require(Count, n_embd=n_embd, n_head=n_head, head_dim=head_dim, count=count)
        self.head_dim, self.count = head_dim, count
        self.wq_b = nn.Linear(q_rank or n_embd, n_head * head_dim, bias=False)
        self.wk = nn.Linear(n_embd, head_dim, bias=False)
        self.k_norm = LayerNorm(head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(n_embd, n_head, bias=False)

    def heads(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: LayerCache = NO_CACHE,
        latent: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The queries (B, J, T, D) and the weights of heads (B, T, J) of the tokens ``x`` (B, T, C)
        with their ``latent`` (B, T, R), and between them all keys (B, 1, S, D): those that
        ``cache`` holds, and the new ones.

        The cache is the indexer's own, one key of D features for each token and no values.
        """
        x = x.detach()
        latent = x if latent is None else latent.detach()
        B, T, _ = x.shape
        q = self.wq_b(latent).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, J, T, D)
        k = self.k_norm(self.wk(x))[:, None]  # (B, 1, T, D)
        q, k = self._turned(q, rotation), self._turned(k, rotation)
        k, _ = cache.update(k, k[..., :0])  # (B, 1, S, D)
        return q, k, self.weights_proj(x)

    def scores(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: LayerCache = NO_CACHE,
        latent: Tensor | None = None,
    ) -> Tensor:
        """The scores (B, T, S) of all keys for the tokens ``x`` (B, T, C), which are given as in
        :meth:`heads`: with a ``latent`` (B, T, R) where the model has one."""
        return index_scores(*self.heads(x, rotation, cache, latent))

    def _turned(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        turning = 2 * rotation[0].shape[-1]
        if turning > self.head_dim:
            raise ValueError(f"the rotation turns {turning} features of head_dim={self.head_dim}")
        return torch.cat([apply_rope(x[..., :turning], *rotation), x[..., turning:]], dim=-1)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        visibility: Visibility,
        cache: LayerCache = NO_CACHE,
        latent: Tensor | None = None,
    ) -> Tensor:
        """The columns (B, T, K) of the keys that each query of ``x`` (B, T, C) should read, -1
        where it sees fewer; ``latent`` is (B, T, R)."""
        return choose(self.scores(x, rotation, cache, latent), visibility, self.count)


class IndexedAttention(nn.Module):
    """An attention layer that sees only what its ``indexer`` chooses: an :class:`Indexer`, or any
    function of (x, rotation, visibility). Put it in place of ``self_attn`` in a built model.

    It is for whole texts: the cache of a model holds no keys of indexers.
    """

    def __init__(self, attention: nn.Module, indexer: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention, self.indexer = attention, indexer

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        visibility: Visibility,
        cache: LayerCache,
    ) -> Tensor:
        chosen = self.indexer(x, rotation, visibility)
        return self.attention(x, rotation, restrict(visibility, chosen), cache)


@contextmanager
def choosing(model: nn.Module, indexers: Sequence[Callable[..., Tensor]]) -> Iterator[None]:
    """Inside the ``with`` block, layer i of a built model reads what ``indexers[i]`` chooses; see
    :class:`IndexedAttention`. Raises ``ValueError`` unless there is one for each layer."""
    layers: list[Any] = list(blocks(model))
    if len(indexers) != len(layers):
        raise ValueError(f"there are {len(indexers)} indexers for {len(layers)} layers")
    full = [layer.self_attn for layer in layers]
    try:
        for layer, attention, indexer in zip(layers, full, indexers, strict=True):
            layer.self_attn = IndexedAttention(attention, indexer)
        yield
    finally:
        for layer, attention in zip(layers, full, strict=True):
            layer.self_attn = attention
