"""Latent attention (MLA): one token after 4,096, beside transformers, and each form beside the
other.

One layer has DeepSeek-V3's widths of a latent and of a head, and fewer heads. Both models have the
same weights and read the same 4,096 tokens; a step feeds one more, and takes it back. transformers
makes the keys and values of all tokens again at each step, as our expanded form does.

    PYTHONPATH=. python tests/benchmarks/bench_latent.py
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import measure
import torch
from measure import FULL, Row, Size

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.generation.generate import decode, prefill
from lm_from_scratch.models.deepseek_v3 import DeepseekV3Config, LatentAttention

CONFIG = DeepseekV3Config(
    vocab_size=97, n_layer=1, n_head=16, n_embd=1024, intermediate_size=64, q_lora_rank=None,
    first_k_dense_replace=1, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
SMOKE = dataclasses.replace(CONFIG, n_head=2, n_kv_head=2, n_embd=16, kv_lora_rank=24)
THEIRS = "transformers"
CHUNK = 256  # tokens of the prompt at a time


class Expanded(LatentAttention):
    """The layer, forbidden to absorb."""

    def absorbs(self, T: int, S: int) -> bool:
        return False


def twins(config: DeepseekV3Config, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Our model, the same that always expands, and theirs, read from one file."""
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(build(config).to(dtype), f"{folder}/model")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=dtype)
        ours, expanded = (from_pretrained(f"{folder}/model") for _ in range(2))
    for block in expanded.backbone.layers:
        block.self_attn.__class__ = Expanded
    return ours, expanded, theirs.eval()


def our_step(model: Any, idx: torch.Tensor) -> Callable[[], torch.Tensor]:
    cache, S = GrowingCache(1, reserve=idx.shape[1] + 1), idx.shape[1]
    prefill(model, idx, cache, chunk=CHUNK)

    def run() -> torch.Tensor:
        logits = decode(model, idx[:, -1], cache)
        cache.crop(S)
        return logits

    return run


def their_step(model: Any, idx: torch.Tensor) -> Callable[[], torch.Tensor]:
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.no_grad():
        for part in idx.split(CHUNK, dim=1):
            model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def run() -> torch.Tensor:
        with torch.no_grad():
            logits = model(idx[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1]
        cache.crop(-1)
        return logits

    return run


def rows(size: Size) -> Iterator[Row]:
    config, S = (SMOKE, 12) if size.smoke else (CONFIG, 4096)
    for dtype in (torch.float32, torch.bfloat16):
        ours, expanded, theirs = twins(config, dtype)
        idx = torch.randint(0, 97, (1, S), generator=torch.Generator().manual_seed(0))
        runs = {
            "ours": our_step(ours, idx),
            "ours, expanded": our_step(expanded, idx),
            THEIRS: their_step(theirs, idx),
        }
        if dtype == torch.float32:
            for kind in ("ours", "ours, expanded"):
                torch.testing.assert_close(runs[kind](), runs[THEIRS](), atol=5e-5, rtol=0)
        title = f"a token after {S:,}, {config.n_head} heads, {str(dtype)[6:]}"
        times = measure.in_turns(runs, size.rows(7), title=title)
        for kind in ("ours", "ours, expanded"):
            yield times.row(title, kind, THEIRS)


if __name__ == "__main__":
    for one in rows(FULL):
        print(one)
