"""Every kind of cache, and the ways to feed a model through one."""

from collections.abc import Callable

import torch
from tiny_models import tiny_deepseek_v3, tiny_gpt2, tiny_qwen2

from lm_from_scratch.cache.buffer import BufferCache
from lm_from_scratch.cache.codec import Quantized
from lm_from_scratch.cache.growing import GrowingCache, GrowingTrack
from lm_from_scratch.cache.interface import NoCache
from lm_from_scratch.cache.paged import BlockPool, PagedCache
from lm_from_scratch.cache.slots import SlidingCache, StaticCache, StaticTrack, cache_for

MODELS = {
    "gpt2": tiny_gpt2(),
    "qwen2": tiny_qwen2(),
    "qwen2, W = 1": tiny_qwen2(sliding_window=1, max_window_layers=0),
    "qwen2, W = 3": tiny_qwen2(sliding_window=3, max_window_layers=0),
    "qwen2, W = 4 in two layers": tiny_qwen2(sliding_window=4, max_window_layers=1),
    "deepseek_v3": tiny_deepseek_v3(),
    "deepseek_v3, W = 3": tiny_deepseek_v3(sliding_window=3, max_window_layers=0),
}
for model in MODELS.values():
    model.double()


class RoundTrip(NoCache):
    """No cache, but keys and values as the codec gives them back: what quantised caches equal."""

    def __init__(self, codec: Quantized) -> None:
        self.codec = codec

    def update(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.codec.decode(self.codec.encode(k)), self.codec.decode(self.codec.encode(v))


def pool(model, block_size: int, n_blocks: int = 200) -> BlockPool:
    n_layer, (heads, D, Dv) = model.config.n_layer, model.config.kv_shape
    return BlockPool(n_layer, heads, D, n_blocks, block_size, dtype=torch.float64, value_dim=Dv)


def window_of(model) -> int | None:
    """The window of a model all of whose layers slide."""
    return None if None in model.config.windows else max(model.config.windows)


#: Each makes an empty cache for a model, or nothing where the kind would lose keys.
KINDS: dict[str, Callable] = {
    "growing": lambda model: GrowingCache(3),
    "growing, reserve 30": lambda model: GrowingCache(3, reserve=30),
    "static": lambda model: StaticCache(3, capacity=60),
    "sliding": lambda model: (w := window_of(model)) and SlidingCache(3, w),
    "sliding, slack 3": lambda model: (w := window_of(model)) and SlidingCache(3, w, slack=3),
    "sliding, wider": lambda model: (w := window_of(model)) and SlidingCache(3, w + 3),
    "layered": lambda model: BufferCache([StaticTrack(60), GrowingTrack()], [1, 0, 1]),
    "by window": lambda model: cache_for(model.config.windows, slack=2),
    "paged, blocks of 1": lambda model: PagedCache(pool(model, 1)),
    "paged, blocks of 4": lambda model: PagedCache(pool(model, 4)),
    "growing, 8 bits": lambda model: GrowingCache(3, Quantized(8, group=32)),
    "static, 4 bits": lambda model: (
        model is not MODELS["gpt2"] and StaticCache(3, 60, Quantized(4, group=4))
    ),
    "sliding, 4 bits": lambda model: (
        (w := window_of(model)) and SlidingCache(3, w, 2, Quantized(4, group=8))
    ),
}


@torch.no_grad()
def in_chunks(idx, chunks, positions=None, *, model) -> torch.Tensor:
    cache, outputs, start = GrowingCache(len(model.config.windows)), [], 0
    for n in chunks:
        part = None if positions is None else positions[:, start : start + n]
        outputs.append(model(idx[:, start : start + n], positions=part, cache=cache))
        start += n
    assert start == idx.shape[1] == cache.length
    return torch.cat(outputs, dim=1)
