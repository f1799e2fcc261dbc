"""The compressor as a module: it makes entries of blocks of tokens, and an indexer chooses some.

The mathematics is in :mod:`lm_from_scratch.attention.pooling`, what is kept between two passes in
:mod:`lm_from_scratch.cache.compressed`. Submodules carry the names of DeepSeek-V4.

Shapes: B batch, T tokens, N entries, C features of a token, R of the query's latent, D of an entry,
J heads of the indexer.
"""

import torch
from torch import Tensor, nn

from lm_from_scratch.attention.indexer import choose, index_scores, restrict
from lm_from_scratch.attention.pooling import Blocks, pool
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.compressed import CompressedMemory, empty_memory
from lm_from_scratch.cache.interface import LayerCache
from lm_from_scratch.layers.norm import RMSNorm
from lm_from_scratch.layers.recurrent import RecurrentLayer
from lm_from_scratch.layers.rope import RotaryEmbedding, apply_rope_interleaved

Rotation = tuple[Tensor, Tensor]


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last features of ``x`` (B, H, T, D) turned by as many pairs as ``cos`` and ``sin`` (B or
    1, 1, T, pairs) have; neighbours are a pair."""
    rest, turned = x.tensor_split([x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    return torch.cat([rest, apply_rope_interleaved(turned, cos, sin)], dim=-1)


class Pooler(nn.Module):
    """Pools blocks of ``size`` tokens to entries of D features, which may ``overlap``: what a
    compressor and its indexer have in common."""

    def __init__(self, n_embd: int, size: int, D: int, overlap: bool, eps: float) -> None:
        super().__init__()
        self.size, self.head_dim = size, D
        self.offers = 2 * D if overlap else D  # features of a token
        self.kv_proj = nn.Linear(n_embd, self.offers, bias=False)
        self.gate_proj = nn.Linear(n_embd, self.offers, bias=False)
        self.position_bias = nn.Parameter(torch.zeros(size, self.offers))
        self.kv_norm = RMSNorm(D, eps)

    def offered(self, x: Tensor, positions: Tensor) -> list[Tensor]:
        """Values and gates of the tokens ``x`` (B, T, C) at ``positions`` (B or 1, T); a gate
        depends on the place in the block, too."""
        return [self.kv_proj(x), self.gate_proj(x) + self.position_bias[positions % self.size]]

    def entries(self, values: Tensor, gates: Tensor, blocks: Blocks, rotation: Rotation) -> Tensor:
        """The entries (B, N, D), turned, of ``blocks`` of the tokens that offer ``values`` and
        ``gates`` (B, A, D or 2 D)."""
        pooled = self.kv_norm(pool(values, gates, blocks, self.size))
        return turn(pooled[:, None], *rotation)[:, 0]


class EntryIndexer(Pooler):
    """Chooses which ``count`` entries a query sees, by smaller entries of its own with J heads for
    queries (:mod:`~lm_from_scratch.attention.indexer`)."""

    def __init__(
        self, n_embd: int, size: int, D: int, eps: float, q_rank: int, J: int, count: int
    ) -> None:
        super().__init__(n_embd, size, D, overlap=True, eps=eps)
        self.count = count
        self.q_b_proj = nn.Linear(q_rank, J * D, bias=False)
        self.scorer = nn.ModuleDict({"weights_proj": nn.Linear(n_embd, J, bias=False)})

    def forward(
        self, x: Tensor, latent: Tensor, rotation: Rotation, entries: Tensor, seen: Visibility
    ) -> Visibility:
        """Of the ``entries`` (B, N, D) that are ``seen`` by the tokens ``x`` (B, T, C), whose
        queries come from ``latent`` (B, T, R), the best alone."""
        q = self.q_b_proj(latent).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        weights = self.scorer["weights_proj"](x)  # (B, T, J)
        scores = index_scores(turn(q, *rotation), entries[:, None], weights)
        return restrict(seen, choose(scores, seen, self.count))


class Compressor(Pooler, RecurrentLayer):
    """The entries of a layer, and who sees them: all, or what an ``indexer`` chooses. What it keeps
    of a text is a state: no token can be taken back."""

    indexer: EntryIndexer | None

    def __init__(
        self, n_embd: int, size: int, D: int, eps: float, rotary: RotaryEmbedding,
        indexer: EntryIndexer | None = None,
    ) -> None:  # fmt: skip
        super().__init__(n_embd, size, D, overlap=indexer is not None, eps=eps)
        self.width = size if indexer is None else 2 * size  # tokens of an entry
        self.rotary_emb, self.indexer = rotary, indexer

    @property
    def poolers(self) -> list[Pooler]:
        """Those that make entries: itself, and the indexer."""
        return [self] if self.indexer is None else [self, self.indexer]

    def initial_state(self, x: Tensor) -> tuple[Tensor, ...]:
        offers = [pooler.offers for pooler in self.poolers for _ in ("values", "gates")]
        return empty_memory(x, offers, [pooler.head_dim for pooler in self.poolers])

    def forward(
        self,
        x: Tensor,
        latent: Tensor,
        rotation: Rotation,
        visibility: Visibility,
        cache: LayerCache,
    ) -> tuple[Tensor, Visibility]:
        """All entries (B, N, D) so far, and which of them the tokens ``x`` (B, T, C) see, whose
        queries come from ``latent`` (B, T, R)."""
        state, positions = cache.state(*self.initial_state(x)), visibility.query_positions
        new = [part for pooler in self.poolers for part in pooler.offered(x, positions)]
        memory = CompressedMemory(state, new, visibility, self.size, self.width)
        blocks, pairs = memory.blocks, zip(memory.waiting[::2], memory.waiting[1::2])
        starts = self.rotary_emb((blocks.ends - self.size + 1).clamp(min=0), x.dtype)
        memory.add(*(p.entries(*pair, blocks, starts) for p, pair in zip(self.poolers, pairs)))
        cache.note(*memory.state)
        seen = memory.visibility
        if self.indexer is not None:
            seen = self.indexer(x, latent, rotation, memory.entries[1], seen)
        return memory.entries[0], seen
