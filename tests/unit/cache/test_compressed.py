"""The memory of layers that pool, in every kind of cache: the laws of states, and its bytes."""

import pytest
import torch
from caches import KINDS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cache_laws import BOUND, Twin, each_with_each, feed_some
from test_states import LAWS
from tiny_models import enlarge_, token_ids

from lm_from_scratch.cache.codec import Quantized
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.restricted import Restricted
from lm_from_scratch.cache.slots import cache_for
from lm_from_scratch.models.deepseek_v4 import (
    HASHED,
    HEAVY,
    SCORED,
    SPARSE,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
)
from lm_from_scratch.models.qwen2 import SLIDING


def pooling(*words: str, seed: int = 0) -> DeepseekV4ForCausalLM:
    """A model of three layers: the codecs of the test's caches cut heads of 32 features."""
    config = DeepseekV4Config(
        vocab_size=97, n_layer=3, n_head=4, n_embd=20, head_dim=32, partial_rotary_factor=0.25,
        q_lora_rank=10, o_groups=2, o_lora_rank=6, sliding_window=4, layer_types=words,
        mlp_layer_types=(HASHED, SCORED, SCORED), sparse_rate=2, heavy_rate=3, index_n_heads=24,
        index_head_dim=8, index_topk=2, hc_mult=2, n_expert=4, top_k=2, expert_size=6,
        eos_token_id=2,
    )  # fmt: skip
    model = DeepseekV4ForCausalLM(config).eval()
    enlarge_(model, seed)
    return model.double()


MODELS = {
    "all kinds": pooling(SLIDING, SPARSE, HEAVY),
    "sparse first": pooling(SPARSE, HEAVY, SPARSE),
}


BLOCKS = ["growing", "static", "by window", "layered", "paged, blocks of 4"]


@pytest.mark.parametrize(("kind", "law", "examples"), [*each_with_each(BLOCKS, LAWS, (2, 12))])
def test_every_kind_obeys_every_law_with_blocks(kind: str, law, examples: int) -> None:
    @settings(max_examples=examples)
    @given(
        name=st.sampled_from(list(MODELS)),
        batch=st.integers(1, 3),
        seed=st.integers(0, 10**6),
        data=st.data(),
    )
    def run(name, batch, seed, data) -> None:
        if not KINDS[kind](MODELS[name]):
            return
        twin = Twin(kind, MODELS[name], batch, seed)
        law(twin, data)
        feed_some(twin, data)
        assert twin.error < BOUND

    run()


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[601], [600, 1], [300, 299, 2]])
def test_the_bytes_are_those_of_the_formula(chunks: list[int]) -> None:
    """An entry for each block, a window, and at most W - 1 tokens that wait."""
    model, T = MODELS["all kinds"], 601
    cache, config = cache_for(model.config.windows), model.config
    for part in token_ids(1, T).split(chunks, dim=1):
        model(part, cache=cache)
    D, Di, (m, M), W = 32, 8, (2, 3), config.sliding_window
    window = 3 * (W + 1) * D  # and a slot for what is not kept
    entries = T // m * (D + Di) + T // M * D
    waiting = (2 * m - 1) * 2 * 2 * (D + Di) + (M - 1) * 2 * D
    positions = (T // m + T // M) + (2 * m - 1) + (M - 1)
    assert cache.nbytes == 8 * (window + entries + waiting + positions)


@torch.no_grad()
def test_rows_that_end_their_blocks_at_different_times_waste_no_place() -> None:
    model, cache = MODELS["all kinds"], cache_for(MODELS["all kinds"].config.windows)
    idx, start = token_ids(3, 60), torch.tensor([[0], [-1], [-2]])
    for n in range(60):
        positions = (start + n).clamp(min=-1)
        model(idx[:, n : n + 1], positions=positions, cache=cache)
    ends = cache.states[1][1]
    assert ends[:, -2:].tolist() == [[57, 59], [57, -1], [57, -1]]


@torch.no_grad()
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_keys_that_are_values_too_are_near_the_exact_ones(bits: int) -> None:
    model, idx = MODELS["all kinds"], token_ids(2, 11)
    cache = GrowingCache(3, Quantized(bits, group=4))
    logits = torch.cat([model(part, cache=cache) for part in idx.split([7, 1, 3], dim=1)], dim=1)
    exact = model(idx)
    assert 0 < (logits - exact).norm() / exact.norm() < (0.5 if bits == 4 else 0.05)


def test_a_mask_cannot_restrict_what_is_pooled() -> None:
    allowed = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="a mask cannot restrict"):
        MODELS["sparse first"](token_ids(1, 3), cache=Restricted(NO_CACHE, allowed))
