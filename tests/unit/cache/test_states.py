"""States of recurrent layers in every kind of cache: the laws of caches, for a model in which some
layers have a state and no keys, and for one in which all have."""

import pytest
import torch
from caches import KINDS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cache_laws import (
    BOUND,
    Twin,
    each_with_each,
    feed_some,
    law_any_chunking,
    law_failed_pass,
    law_reset,
    law_select,
    law_unequal_rows,
)
from tiny_models import enlarge_, token_ids

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.paged import PagedCache
from lm_from_scratch.cache.restricted import Restricted
from lm_from_scratch.cache.slots import cache_for
from lm_from_scratch.interop.cache_file import save_cache
from lm_from_scratch.interop.caches import to_legacy, to_transformers
from lm_from_scratch.models.qwen2 import FULL
from lm_from_scratch.models.qwen3_next import LINEAR, Qwen3NextConfig, Qwen3NextForCausalLM


def hybrid(*words: str) -> Qwen3NextForCausalLM:
    """A model of three layers: the codecs of the test's caches cut heads of 32 features."""
    config = Qwen3NextConfig(
        vocab_size=97, n_layer=3, n_head=2, n_kv_head=1, n_embd=20, head_dim=32,
        intermediate_size=24, layer_types=words, linear_num_key_heads=1, linear_num_value_heads=2,
        linear_key_head_dim=6, linear_value_head_dim=5, linear_conv_kernel_dim=3, eos_token_id=2,
        mlp_only_layers=(0, 1, 2),
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).eval()
    enlarge_(model)
    return model.double()


MODELS = {
    "state, keys, state": hybrid(LINEAR, FULL, LINEAR),
    "keys, state, state": hybrid(FULL, LINEAR, LINEAR),
    "states alone": hybrid(LINEAR, LINEAR, LINEAR),
}


def law_crop(twin: Twin, data) -> None:
    """Back to nothing, or to where it is; anywhere else is refused, and changes nothing."""
    feed_some(twin, data)
    feed_some(twin, data)
    lengths = [len(row) for row in twin.rows]
    each = data.draw(st.booleans())
    keep = [data.draw(st.sampled_from([0, n, n - 1])) for n in lengths]
    keep = keep if each else [data.draw(st.sampled_from([0, max(lengths), max(keep)]))] * len(keep)
    everything = all(k >= n for k, n in zip(keep, lengths, strict=True))
    if everything or not any(keep):
        twin.cache.crop(torch.tensor(keep) if each else keep[0])
        twin.rows = [row[:k] for row, k in zip(twin.rows, keep, strict=True)]
        twin.dense = (twin.dense and not each) or not any(keep)
        assert any(keep) or not twin.cache.states
    else:
        before = twin.cache.states
        with pytest.raises(ValueError, match="takes tokens back, and a state cannot go back"):
            twin.cache.crop(torch.tensor(keep) if each else keep[0])
        assert twin.cache.states is before
    assert twin.cache.slack == 0 or not any(keep)


LAWS = [law_any_chunking, law_unequal_rows, law_crop, law_select, law_failed_pass, law_reset]


@pytest.mark.parametrize(("kind", "law", "examples"), [*each_with_each(KINDS, LAWS, (2, 12))])
def test_every_kind_obeys_every_law_with_states(kind: str, law, examples: int) -> None:
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
def test_states_alone_take_the_same_memory_after_any_number_of_tokens() -> None:
    model = MODELS["states alone"]
    cache = cache_for(model.config.windows)
    model(token_ids(2, 3), cache=cache)
    few = cache.nbytes
    assert few == cache.state_nbytes == 2 * 3 * 8 * (2 * 22 + 2 * 6 * 5)
    model(token_ids(2, 90), cache=cache)
    assert cache.nbytes == few and cache.length == 93 and cache.batch == 2
    assert cache.tracks[0].positions.shape[1] == 2  # of two slots, the table too
    paged = KINDS["paged, blocks of 4"](MODELS["state, keys, state"])
    MODELS["state, keys, state"](token_ids(2, 3), cache=paged)
    assert paged.nbytes == paged.pool.nbytes // 200 * 2 + paged.state_nbytes


@torch.no_grad()
def test_a_state_is_neither_made_up_nor_mixed_with_keys() -> None:
    model, idx = MODELS["state, keys, state"], token_ids(1, 4)
    paged = KINDS["paged, blocks of 4"](model)
    model(idx, cache=paged)
    with pytest.raises(ValueError, match="layer 0 needs the state after 4 tokens, and the PagedC"):
        model(idx, cache=PagedCache(paged.pool, [paged.pool.fork(paged.rows[0])]))
    cache = GrowingCache(3)
    model(idx, cache=cache)
    with pytest.raises(ValueError, match="layer 0 has keys, but the cache holds a state for it"):
        MODELS["keys, state, state"](idx, cache=cache)
    with pytest.raises(ValueError, match=r"layer 0 keeps a state of .*float32.*, the cache holds"):
        model.float()(idx, cache=cache)
    model.double()
    assert cache.length == 4


@torch.no_grad()
def test_states_move_with_their_rows() -> None:
    cache, other = GrowingCache(1), GrowingCache(1)
    for one, rows in ((cache, [0, 1, 2]), (other, [2, 0, 0])):
        one.see(torch.zeros(3, 1, 2), windows=[1])
        one[0].keep(torch.arange(3.0)[rows], torch.ones(3, 2)[rows])
    cache.select(torch.tensor([2, 0, 0]))
    assert all(map(torch.equal, cache.states[0], other.states[0]))
    cache.repeat(2)
    assert cache.states[0][0].tolist() == [2, 2, 0, 0, 0, 0] and cache.batch == 6


def test_to_go_back_is_refused_but_for_all_the_way() -> None:
    cache = GrowingCache(1)
    cache.see(torch.zeros(1, 5, 2), windows=[1])
    cache[0].keep(torch.ones(1))
    cache.crop(5)
    for length in (4, -1, torch.tensor([3])):
        with pytest.raises(ValueError, match=r"takes tokens back, .* holds \[5\] tokens"):
            cache.crop(length)
    assert cache.slack == 0 and cache.length == 5
    cache.crop(0)
    assert cache.states == {} and cache.batch is None and cache.slack is None


def test_misuse_is_refused() -> None:
    x, state = torch.zeros(2, 1, 3), torch.ones(2, 3)
    cache = GrowingCache(2)
    with pytest.raises(ValueError, match="layer 0 was updated, but see is next"):
        cache[0].state(state)
    cache.see(x, windows=[1, 1])
    with pytest.raises(ValueError, match="layer 1 was updated, but layer 0 is next"):
        cache[1].keep(state)
    with pytest.raises(ValueError, match="a cache keeps no gradients"):
        cache[0].keep(state.clone().requires_grad_())
    with pytest.raises(ValueError, match="layer 0 handed over no tensors"):
        cache[0].keep()
    assert cache[0].state(state)[0] is state
    cache[0].keep(state)
    assert cache.states == {} and cache.batch is None  # not before the pass is complete
    cache[1].keep(state)
    assert cache.batch == 2 and cache.states.keys() == {0, 1}
    assert NO_CACHE[0].state(state)[0] is state and NO_CACHE[0].keep(state) is None


@torch.no_grad()
def test_what_knows_keys_alone_refuses_states(tmp_path) -> None:
    model, idx = MODELS["state, keys, state"], token_ids(1, 4)
    cache = cache_for(model.config.windows)
    model(idx, cache=cache)
    reason = r"the BufferCache holds a state in layers \[0, 2\]: only keys and values can be taken"
    for convert in (to_legacy, to_transformers, lambda c: save_cache(c, tmp_path / "cache")):
        with pytest.raises(ValueError, match=reason):
            convert(cache)
    assert not list(tmp_path.iterdir())
    allowed = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="a mask cannot restrict a recurrent layer"):
        model(idx, cache=Restricted(NO_CACHE, allowed))


@torch.no_grad()
def test_a_cache_of_transformers_with_states_is_refused() -> None:
    from tiny_models import hf_twin

    from lm_from_scratch.interop.caches import from_transformers

    theirs = hf_twin(MODELS["state, keys, state"].float())
    MODELS["state, keys, state"].double()
    cache = theirs(token_ids(1, 4), use_cache=True).past_key_values
    with pytest.raises(
        ValueError, match=r"layer 0, .*LinearAttention.*of a kind that is not known"
    ):
        from_transformers(cache)
