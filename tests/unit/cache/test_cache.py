"""Growing, static and sliding caches: what each keeps, and clear errors. That a pass in pieces is
one pass, for every kind, is in test_cache_laws.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import hf_twin, tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.cache.buffer import BufferCache
from lm_from_scratch.cache.growing import CatCache, GrowingCache, GrowingTrack
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.kv import KVCache
from lm_from_scratch.cache.restricted import Restricted
from lm_from_scratch.cache.slots import SlidingCache, StaticCache, cache_for
from lm_from_scratch.interop.caches import to_legacy, to_transformers

MODEL = tiny_gpt2()


def test_the_cache_grows_by_the_tokens_that_are_fed() -> None:
    cache, lengths = GrowingCache(MODEL.config.n_layer), []
    with torch.no_grad():
        for n in (6, 1, 1, 1):
            MODEL(token_ids(1, n), cache=cache)
            lengths.append((cache.length, cache.contents(0)[2].shape[1]))
    assert lengths == [(6, 6), (7, 7), (8, 8), (9, 9)]


def test_positions_continue_after_the_cache() -> None:
    cache = GrowingCache(MODEL.config.n_layer)
    with torch.no_grad():
        MODEL(token_ids(1, 5), cache=cache)
        visibility = cache.see(token_ids(1, 2), windows=MODEL.config.windows)[0]
    assert visibility.query_positions.tolist() == [[5, 6]]
    assert visibility.key_positions.tolist() == [list(range(7))]


def one_layer(cache: KVCache, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A pass through a cache with one layer and without a model."""
    cache.see(k[:, 0])
    return cache[0].update(k, v)


def test_the_buffer_is_reallocated_a_logarithmic_number_of_times() -> None:
    cache, pointers = GrowingCache(1), set()
    one = torch.ones(1, 1, 1, 4)
    for _ in range(400):
        one_layer(cache, one, one)
        pointers.add((cache.keys[0].parts[0].data_ptr(), cache.keys[0].slots))
    assert cache.length == 400
    assert len({slots for _, slots in pointers}) == 10  # 1, 2, 4, ..., 512


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 10**6))
def test_a_growing_cache_is_concatenation(chunks: list[int], seed: int) -> None:
    ours, plain = GrowingCache(2), [CatCache(), CatCache()]
    generator = torch.Generator().manual_seed(seed)
    for n in chunks:
        ours.see(torch.empty(3, n), windows=[None, None])
        for layer in range(2):
            k, v = torch.randn(2, 3, 2, n, 4, generator=generator)
            for one, other in zip(ours[layer].update(k, v), plain[layer].update(k, v), strict=True):
                assert torch.equal(one, other)
    for layer in range(2):
        k, v, _ = ours.contents(layer)
        assert torch.equal(k, plain[layer].held[0]) and torch.equal(v, plain[layer].held[1])


def test_no_cache_returns_what_it_was_given() -> None:
    k, v = torch.randn(1, 1, 2, 3), torch.randn(1, 1, 2, 3)
    assert NO_CACHE[7].update(k, v)[0] is k and NO_CACHE[7].update(k, v)[1] is v
    idx = token_ids(1, 4)
    assert torch.equal(MODEL(idx), MODEL(idx))  # nothing was kept


def test_a_cache_of_another_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="1 layers, the model 3"), torch.no_grad():
        MODEL(token_ids(1, 4), cache=GrowingCache(1))
    with pytest.raises(ValueError, match="n_layer=0"):
        GrowingCache(0)


def test_misuse_is_refused_with_both_values() -> None:
    cache, one = GrowingCache(1), torch.ones(2, 3, 1, 5)
    one_layer(cache, one, one)
    with pytest.raises(ValueError, match="the cache holds 2 rows, the tokens 1"):
        one_layer(cache, one[:1], one[:1])
    with pytest.raises(ValueError, match=r"\(2, 3, 5\) in .*, the new tensor has \(2, 1, 5\)"):
        one_layer(cache, one[:, :1], one[:, :1])
    with pytest.raises(ValueError, match=r"float32, the new tensor has .* in torch\.bfloat16"):
        one_layer(cache, one.bfloat16(), one.bfloat16())
    one_layer(cache, one, one)
    with pytest.raises(ValueError, match="layer 0 was updated, but see is next"):
        cache[0].update(one, one)
    with pytest.raises(ValueError, match="no gradients"):
        MODEL(token_ids(1, 4), cache=GrowingCache(3))
    with torch.no_grad():
        with pytest.raises(ValueError, match="packed documents"):
            MODEL(
                token_ids(1, 4),
                documents=torch.zeros(1, 4, dtype=torch.long),
                cache=GrowingCache(3),
            )
        cache = GrowingCache(3)
        MODEL(
            token_ids(1, 4),
            positions=positions_from_mask(torch.tensor([[0, 1, 1, 1]])),
            cache=cache,
        )
        with pytest.raises(ValueError, match="positions are needed"):
            MODEL(token_ids(1, 1), cache=cache)


def test_a_forward_that_fails_leaves_the_cache_as_it_was() -> None:
    """A token that is not in the vocabulary fails after the cache has seen its position."""
    idx = token_ids(1, 9)
    want = MODEL(idx)
    mask = positions_from_mask(torch.ones(1, 9))
    for positions in (None, mask):
        cache = GrowingCache(3)
        part = None if positions is None else positions[:, :4]
        with torch.no_grad():
            MODEL(idx[:, :4], positions=part, cache=cache)
            with pytest.raises(ValueError, match="idx holds 5"):
                MODEL(torch.tensor([[5, 97]]), cache=cache) if part is None else MODEL(
                    torch.tensor([[5, 97]]), positions=positions[:, 4:6], cache=cache
                )
            with pytest.raises(ValueError, match="block_size"):
                far = torch.tensor([[500]])
                MODEL(idx[:, :1], positions=far, cache=cache)
            with pytest.raises(ValueError, match="holds 1 rows, the tokens 2"):
                MODEL(token_ids(2, 1), cache=cache)
            assert cache.length == 4
            rest = None if positions is None else positions[:, 4:]
            got = MODEL(idx[:, 4:], positions=rest, cache=cache)
        torch.testing.assert_close(got, want[:, 4:], atol=2e-5, rtol=0)


def test_dense_ends_with_the_first_explicit_positions() -> None:
    cache, idx = GrowingCache(3), token_ids(1, 9)
    with torch.no_grad():
        MODEL(idx[:, :4], cache=cache)
        MODEL(idx[:, 4:6], positions=torch.tensor([[4, 5]]), cache=cache)
        with pytest.raises(ValueError, match="positions are needed"):
            MODEL(idx[:, 6:7], cache=cache)
        got = MODEL(idx[:, 6:], positions=torch.tensor([[6, 7, 8]]), cache=cache)
    torch.testing.assert_close(got, MODEL(idx)[:, 6:], atol=2e-5, rtol=0)


def test_documents_need_positions_of_the_right_kind() -> None:
    idx, positions = token_ids(2, 4), torch.tensor([[0, 1, 0, 1]] * 2)
    with pytest.raises(ValueError, match="documents need positions"):
        MODEL(idx, documents=positions)
    with pytest.raises(ValueError, match=r"shape \(1, 4\)"):
        MODEL(idx, positions=positions, documents=positions[:1])
    with pytest.raises(ValueError, match="documents have"):
        MODEL(idx, positions=positions, documents=positions.float())
    with pytest.raises(ValueError, match="at least one"):
        MODEL(idx[:, :0])
    want = MODEL(idx, positions=positions, documents=positions)
    assert torch.equal(MODEL(idx, positions=positions.to(torch.int16), documents=positions), want)


@torch.no_grad()
def test_a_static_cache_that_is_full_says_so_and_stays_as_it_was() -> None:
    idx = token_ids(2, 11)
    mask = positions_from_mask(torch.ones(2, 11))
    for positions in (None, mask):
        cache = StaticCache(3, capacity=10)
        MODEL(idx[:, :8], positions=None if positions is None else positions[:, :8], cache=cache)
        late = None if positions is None else positions[:, 8:]
        with pytest.raises(ValueError, match="11 tokens do not fit into a cache of capacity=10"):
            MODEL(idx[:, 8:], positions=late, cache=cache)
        assert cache.length == 8
        got = MODEL(idx[:, 8:10], positions=None if late is None else late[:, :2], cache=cache)
        torch.testing.assert_close(got, MODEL(idx[:, :10])[:, 8:], atol=2e-5, rtol=0)
    with pytest.raises(ValueError, match="capacity=0"):
        StaticCache(3, capacity=0)


@torch.no_grad()
def test_a_static_cache_always_has_the_same_shapes_and_memory() -> None:
    cache, shapes, memory = StaticCache(1, capacity=12), set(), set()
    for n in (5, 1, 1, 3):
        keys, _ = one_layer(cache, torch.ones(2, 1, n, 4), torch.ones(2, 1, n, 4))
        shapes.add(keys.shape)
        memory.add((keys.data_ptr(), cache.nbytes))
    assert shapes == {(2, 1, 12, 4)} and len(memory) == 1


def test_a_sliding_cache_refuses_a_layer_that_sees_further() -> None:
    idx = token_ids(1, 3)
    with torch.no_grad():
        with pytest.raises(ValueError, match="layer 0 sees all keys, the cache keeps window=4"):
            MODEL(idx, cache=SlidingCache(3, 4))
        model = tiny_qwen2(sliding_window=5, max_window_layers=0)
        with pytest.raises(ValueError, match="layer 0 sees 5 keys, the cache keeps window=4"):
            model(idx, cache=SlidingCache(3, 4))
    for bad in (dict(window=0), dict(window=3, slack=-1)):
        with pytest.raises(ValueError, match="must"):
            SlidingCache(3, **bad)


@torch.no_grad()
def test_a_sliding_cache_holds_min_of_length_and_window_in_every_layer() -> None:
    model = tiny_qwen2(sliding_window=4, max_window_layers=1)
    cache = cache_for(model.config.windows)
    assert [track.window for track in cache.tracks] == [None, 4] and cache.owner == [0, 1, 1]
    for n in range(1, 11):
        model(token_ids(1, 1), cache=cache)
        full, ring = cache.tracks
        assert (full.positions >= 0).sum() == n
        assert (ring.positions >= 0).sum() == min(n, 4)
        assert sorted(p for p in ring.positions[0].tolist() if p >= 0) == list(range(n))[-4:]
    bytes_of_a_token = 2 * 2 * 8 * 4  # keys and values, heads, features, bytes
    for layer in (1, 2):
        held = cache.keys[layer].nbytes + cache.values[layer].nbytes
        assert held == (4 + 1) * bytes_of_a_token


@pytest.mark.parametrize("window", [2, 3, 4])
def test_the_config_says_which_layers_slide(window: int) -> None:
    """Window 4, ten tokens: the historic cache kept 10. A layer of ours keeps 4; theirs keeps 3."""
    words = ("full_attention", "sliding_attention", "sliding_attention")
    model = tiny_qwen2(sliding_window=window, layer_types=words)
    cache, idx = cache_for(model.config.windows), token_ids(2, 14)
    with torch.no_grad():
        for part in (idx[:, :6], idx[:, 6:9], idx[:, 9:10]):
            model(part, cache=cache)
        assert [k.shape[2] for k, _ in to_legacy(cache)[0]] == [10, window, window]
        theirs = to_transformers(cache)
        oracle = hf_twin(model)(idx[:, :10]).past_key_values
        for layer, other in zip(theirs.layers, oracle.layers, strict=True):
            assert type(layer) is type(other) and layer.keys.shape == other.keys.shape
            assert layer.get_seq_length() == other.get_seq_length() == 10
        sliding = cache.keys[1].nbytes
        got = model(idx[:, 10:], cache=cache)
    assert cache.keys[1].nbytes == sliding
    torch.testing.assert_close(got, model(idx)[:, 10:], atol=5e-5, rtol=0)


def test_what_a_ring_has_lost_is_not_taken_back_in_two_steps() -> None:
    model, idx = tiny_qwen2(sliding_window=3, max_window_layers=0), token_ids(2, 20)
    cache = SlidingCache(3, window=3, slack=2)
    with torch.no_grad():
        model(idx, cache=cache)
        cache.crop(18)
        with pytest.raises(ValueError, match="only slack=2 in all"):
            cache.crop(16)
        got = model(idx[:, 18:], cache=cache)
    torch.testing.assert_close(got, model(idx)[:, 18:], atol=5e-5, rtol=0)


def test_every_layer_has_a_track_and_every_track_a_layer() -> None:
    two = GrowingTrack(), GrowingTrack()
    for tracks, owner in ((two, [0]), (two[:1], [0, 1]), ((), [0]), (two, [0, -1])):
        with pytest.raises(ValueError, match=f"must name each of the {len(tracks)} tracks"):
            BufferCache(tracks, owner)


@torch.no_grad()
def test_layers_with_one_window_share_one_mask_and_others_have_their_own() -> None:
    model = tiny_qwen2(sliding_window=2, max_window_layers=1)
    for cache in (NO_CACHE, GrowingCache(3), cache_for(model.config.windows)):
        full, one, other = cache.see(token_ids(1, 5), None, None, model.config.windows)
        assert one is other and one.window == 2 and full.window is None


@torch.no_grad()
def test_a_restricted_cache_is_as_strict_as_the_cache() -> None:
    model, idx = tiny_qwen2(), token_ids(1, 6)
    everything = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match="layer 0 sees all keys, the cache keeps window=4"):
        model(idx, cache=Restricted(SlidingCache(3, 4), everything))
    layered = Restricted(BufferCache([GrowingTrack(), GrowingTrack()], [1, 0, 1]), everything)
    torch.testing.assert_close(model(idx, cache=layered), model(idx), atol=5e-5, rtol=0)


@torch.no_grad()
def test_a_ring_knows_what_a_jump_has_pushed_out() -> None:
    model = tiny_qwen2(sliding_window=4, max_window_layers=0)
    cache = SlidingCache(3, 4, slack=2)
    model(token_ids(1, 5), positions=torch.tensor([[0, 1, 2, 3, 8]]), cache=cache)
    with pytest.raises(ValueError, match="only slack=2"):
        cache.crop(7)
