"""cache: full forward == prefill + decode == any chunking, and clear errors."""

import pytest
import torch
from caches import KINDS, MODELS, in_chunks
from caches import pool as new_pool
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.visibility import positions_from_mask
from lm_from_scratch.cache.buffer import BufferCache
from lm_from_scratch.cache.codec import EXACT, Quantized
from lm_from_scratch.cache.growing import CatCache, GrowingCache, GrowingTrack
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.kv import KVCache
from lm_from_scratch.cache.paged import BlockPool, PagedCache, Row
from lm_from_scratch.cache.restricted import Restricted
from lm_from_scratch.cache.slots import SlidingCache, StaticCache, cache_for
from lm_from_scratch.text.batches import padded_batch

MODEL = tiny_gpt2()


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 10**6))
def test_full_equals_any_chunking(chunks: list[int], seed: int) -> None:
    idx = token_ids(2, sum(chunks), seed=seed)
    torch.testing.assert_close(in_chunks(idx, chunks, model=MODEL), MODEL(idx), atol=2e-5, rtol=0)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.sampled_from(["left", "right"]))
def test_unequal_rows_in_chunks_equal_each_row_alone(lengths: list[int], side: str) -> None:
    rows = [token_ids(n, seed=i).tolist() for i, n in enumerate(lengths)]
    batch = padded_batch(rows, pad_token_id=0, side=side)
    total = batch.idx.shape[1]
    chunks = [min(3, total - i) for i in range(0, total, 3)]
    logits = in_chunks(batch.idx, chunks, batch.positions, model=MODEL)
    for i, row in enumerate(rows):
        alone = MODEL(torch.tensor([row]))
        real = logits[i][batch.positions[i] >= 0]
        torch.testing.assert_close(real, alone[0], atol=2e-5, rtol=0)


def test_G1_G2_G3_G4_chunks_with_a_past_see_the_right_keys_at_the_right_positions() -> None:
    """5, 1, 3, 3: the historic code raised, then fed tokens twice, then restarted positions."""
    idx = token_ids(2, 12)
    torch.testing.assert_close(
        in_chunks(idx, (5, 1, 3, 3), model=MODEL), MODEL(idx), atol=2e-5, rtol=0
    )


def test_G3_the_cache_grows_by_the_tokens_that_are_fed() -> None:
    cache, lengths = GrowingCache(MODEL.config.n_layer), []
    with torch.no_grad():
        for n in (6, 1, 1, 1):
            MODEL(token_ids(1, n), cache=cache)
            lengths.append((cache.length, cache.contents(0)[2].shape[1]))
    assert lengths == [(6, 6), (7, 7), (8, 8), (9, 9)]


def test_G4_positions_continue_after_the_cache() -> None:
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


def test_K11_the_buffer_is_reallocated_a_logarithmic_number_of_times() -> None:
    cache, pointers = GrowingCache(1), set()
    one = torch.ones(1, 1, 1, 4)
    for _ in range(400):
        one_layer(cache, one, one)
        pointers.add((cache.keys[0].parts[0].data_ptr(), cache.keys[0].slots))
    assert cache.length == 400
    assert len({slots for _, slots in pointers}) == 10  # 1, 2, 4, ..., 512


def test_K1_the_layout_is_the_same_in_and_out() -> None:
    cache = GrowingCache(1)
    k, v = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    keys, values = one_layer(cache, k, v)
    assert torch.equal(keys, k) and torch.equal(values, v)
    keys, values = one_layer(cache, k, v)
    assert torch.equal(keys, torch.cat([k, k], 2)) and torch.equal(values, torch.cat([v, v], 2))


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


def test_G31_a_cache_of_another_depth_is_refused() -> None:
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


def test_an_empty_cache_has_no_truth_value_of_its_own() -> None:
    assert GrowingCache(1)  # not falsy, as an empty container would be
    with pytest.raises(TypeError):
        len(GrowingCache(1))  # type: ignore[arg-type]


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
            with pytest.raises(IndexError):
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


def test_a_layer_that_ran_ahead_is_brought_back() -> None:
    cache, idx = GrowingCache(3), token_ids(1, 9)
    with torch.no_grad():
        MODEL(idx[:, :4], cache=cache)
        hook = MODEL.transformer.h[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            MODEL(token_ids(1, 3, seed=9), cache=cache)
        hook.remove()
        assert cache.keys[0].slots >= 7 and cache.length == 4
        got = MODEL(idx[:, 4:], cache=cache)
    torch.testing.assert_close(got, MODEL(idx)[:, 4:], atol=2e-5, rtol=0)


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
    with pytest.raises(ValueError, match="integers of shape"):
        MODEL(idx, positions=positions, documents=positions.float())
    with pytest.raises(ValueError, match="at least one"):
        MODEL(idx[:, :0])
    want = MODEL(idx, positions=positions, documents=positions)
    assert torch.equal(MODEL(idx, positions=positions.to(torch.int16), documents=positions), want)


# --------------------------------------------------------------------------- what is refused


EVERY_KIND = [kind for kind in KINDS if "4 bits" not in kind]


def filled(kind: str):
    """A model that slides in every layer, and a cache of that kind with two rows of 7 tokens."""
    model = MODELS["qwen2, W = 3"]
    cache = KINDS[kind](model)
    with torch.no_grad():
        model(token_ids(2, 7), cache=cache)
    return model, cache


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_bad_input_is_refused_and_changes_nothing(kind: str) -> None:
    model, cache = filled(kind)
    other = tiny_qwen2(n_layer=2, sliding_window=3, max_window_layers=0).double()
    wide = tiny_qwen2(n_kv_head=3, sliding_window=3, max_window_layers=0).double()
    one, two = token_ids(1, 1), token_ids(2, 1)
    with torch.no_grad():
        for bad, message in (
            (lambda: model(one, cache=cache), "holds 2 rows, the tokens 1"),
            (lambda: other(two, cache=cache), "3 layers, the model 2"),
            (lambda: model.float()(two, cache=cache), r"float64.* in torch.float32"),
            (lambda: wide(two, cache=cache), r"heads, D\) = "),
            (lambda: cache.crop(8), r"length=8 is not in 0 ... 7"),
            (lambda: cache.crop(-8), r"length=-1 is not in 0 ... 7"),
            (lambda: cache.crop(torch.tensor([7])), r"an integer for each of the 2 rows"),
            (lambda: cache.crop(torch.tensor([7, 9])), r"length=\[7, 9\] is not in 0 ... \[7, 7\]"),
            (lambda: cache.select(torch.tensor([0, 2])), r"rows=\[0, 2\]"),
            (lambda: cache.select(torch.tensor([])), r"rows=\[\] must be a list"),
            (lambda: cache.reorder(torch.tensor([0])), r"must name 2 rows"),
            (lambda: cache.repeat(0), "times=0 must be an integer, at least 1"),
            (lambda: cache[3], "layer 3 is not below the cache's 3 layers"),
            (lambda: cache[-1], "layer -1"),
        ):
            with pytest.raises(ValueError, match=message):
                bad()
            model.double()
        want = model(token_ids(2, 9, seed=1))
        cache.reset()
        first = model(token_ids(2, 9, seed=1)[:, :7], cache=cache)
        got = model(token_ids(2, 9, seed=1)[:, 7:], cache=cache)
    if "bits" not in kind:
        torch.testing.assert_close(torch.cat([first, got], 1), want, atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_an_empty_cache_has_no_rows_to_move(kind: str) -> None:
    cache = KINDS[kind](MODELS["qwen2, W = 3"])
    for bad in (lambda: cache.select(torch.tensor([0])), lambda: cache.repeat(2)):
        with pytest.raises(ValueError, match="the cache is empty"):
            bad()
    cache.crop(0)
    assert cache.length == 0 and cache.batch is None and cache.lengths.tolist() == []


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
def test_K3_a_sliding_cache_holds_min_of_length_and_window_in_every_layer() -> None:
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


# ----------------------------------------------------------------------------------- quantised


@given(
    st.sampled_from([4, 8]), st.sampled_from([2, 8, 16, 64]), st.floats(-3, 3), st.floats(-2, 2),
    st.integers(0, 10**6),
)  # fmt: skip
def test_quantised_numbers_move_by_at_most_half_a_step(bits, group, scale, shift, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 5, 16, generator=generator) * 10**scale + 10**shift
    codec = Quantized(bits, group)
    codes, low, step = codec.encode(x)
    back = codec.decode([codes, low, step])
    assert codes.dtype == torch.uint8 and back.shape == x.shape and back.dtype == x.dtype
    groups = x.unflatten(-1, (-1, min(group, 16)))
    want = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    torch.testing.assert_close(step[..., 0], want)
    slack = 4 * torch.finfo(x.dtype).eps * groups.abs().amax(-1, keepdim=True)
    error = (back.unflatten(-1, (-1, min(group, 16))) - groups).abs()
    assert (error <= step / 2 + slack).all()
    assert codes.numel() == x.numel() * bits // 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantised_half_precision_keeps_its_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    codec = Quantized(8)
    back = codec.decode(codec.encode(x))
    assert back.dtype == dtype
    step = codec.encode(x)[2].float()
    bound = step / 2 + 2 * torch.finfo(dtype).eps * x.float().abs().max()
    assert ((back - x).float().abs().unflatten(-1, (2, 32)) <= bound).all()


def test_equal_numbers_have_no_step_and_come_back() -> None:
    x = torch.full((1, 1, 1, 8), 3.7)
    assert torch.equal(Quantized(4).decode(Quantized(4).encode(x)), x)


def test_the_error_of_attention_is_bounded_by_the_steps() -> None:
    """Scores move by d <= |q|_1 step/2 / sqrt(D), weights by a factor within exp(+-2d)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, 16, generator=generator).double() for _ in range(3))
    (visibility,) = NO_CACHE.see(q[:, 0])
    want = formula_attention(q, k, v, visibility)
    errors = []
    for bits in (4, 8):
        codec = Quantized(bits, 8)
        parts = codec.encode(k), codec.encode(v)
        got = formula_attention(q, *(codec.decode(part) for part in parts), visibility)
        d = q.abs().sum(-1).amax() * parts[0][2].amax() / 2 / 16**0.5
        bound = parts[1][2].amax() / 2 + (torch.exp(2 * d) - 1) * v.abs().amax()
        errors.append((got - want).abs().max().item())
        assert errors[-1] <= bound
    assert errors[1] < errors[0] / 8


def test_a_quantised_cache_holds_as_many_bytes_as_the_formula_says() -> None:
    k = torch.randn(1, 2, 10, 64)
    sizes = []
    for codec in (EXACT, Quantized(8), Quantized(4)):
        cache = GrowingCache(1, codec)
        one_layer(cache, k, k)
        sizes.append(cache.nbytes)
    numbers, groups = 2 * 2 * 10 * 64, 2 * 2 * 10 * 64 // 32
    assert sizes == [4 * numbers, numbers + 8 * groups, numbers // 2 + 8 * groups]


def test_groups_that_do_not_fit_are_refused() -> None:
    for bad, message in (
        (lambda: Quantized(3), "bits=3 must be 4 or 8"),
        (lambda: Quantized(8, 0), "group=0"),
        (lambda: Quantized(4, 7), "even for 4 bits"),
        (lambda: Quantized(8, 5).encode(torch.ones(1, 1, 1, 16)), "D=16 features cannot be cut"),
        (lambda: Quantized(4, 32).encode(torch.ones(1, 1, 1, 7)), "two codes in a byte"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()


# --------------------------------------------------------------------------------------- paged


def users(pool: BlockPool) -> int:
    return sum(n > 0 for n in pool.users)


@torch.no_grad()
def test_rows_share_blocks_until_one_of_them_writes() -> None:
    model = MODELS["qwen2"]
    pool = new_pool(model, 4, n_blocks=9)
    cache = PagedCache(pool)
    model(token_ids(1, 10), cache=cache)  # 3 blocks, the last one half full
    cache.repeat(4)
    assert users(pool) == 3 and pool.users.count(4) == 3
    exact = 2 * 3 * 2 * 8 * 8  # keys and values, layers, heads, features, bytes
    assert cache.nbytes == 3 * 4 * exact
    model(token_ids(4, 1), cache=cache)  # every row gets its own last block
    assert users(pool) == 6 and sorted(pool.users) == [0, 0, 0, 1, 1, 1, 1, 4, 4]
    cache.select(torch.tensor([2]))
    assert users(pool) == 3
    cache.crop(5)
    assert users(pool) == 2
    cache.reset()
    assert users(pool) == 0 and sorted(pool.free) == list(range(9))


@torch.no_grad()
def test_two_rows_that_share_pages_never_see_each_other() -> None:
    """One row is poisoned after the fork: with NaN, which no weight of 0 takes away."""
    model = MODELS["qwen2"]
    pool = new_pool(model, 4)
    first = Row()
    prefix, rest = token_ids(1, 6), token_ids(1, 5, seed=2)
    model(prefix, cache=PagedCache(pool, [first]))
    second = pool.fork(first)
    model(token_ids(1, 3, seed=9), cache=PagedCache(pool, [second]))
    for position in range(6, 9):
        slot = second.table[position // 4] * 4 + position % 4
        pool.keys[:, slot] = pool.values[:, slot] = torch.nan
    got = model(rest, cache=PagedCache(pool, [first]))
    want = model(torch.cat([prefix, rest], 1))[:, 6:]
    torch.testing.assert_close(got, want, atol=1e-9, rtol=0)
    both = PagedCache(pool, [first, second])  # side by side, of different lengths
    got = model(token_ids(2, 1), positions=both.lengths[:, None], cache=both)
    assert got[0].isfinite().all() and got[1].isnan().all()


@torch.no_grad()
def test_a_pool_that_is_too_small_refuses_before_anything_changes() -> None:
    model = MODELS["qwen2"]
    pool = new_pool(model, 4, n_blocks=4)
    cache = PagedCache(pool)
    model(token_ids(2, 7), cache=cache)
    state = [list(row.table) for row in cache.rows], list(pool.users)
    with pytest.raises(ValueError, match="2 more blocks are needed, 0 of the pool's 4 are free"):
        model(token_ids(2, 2), cache=cache)
    assert state == ([list(row.table) for row in cache.rows], list(pool.users))
    model(token_ids(2, 1), cache=cache)
    assert cache.length == 8
    with pytest.raises(ValueError, match="all 4 blocks of the pool are in use"):
        pool.allocate()
    cache.reset()
    with pytest.raises(ValueError, match="block 0 is released, but nobody uses it"):
        pool.release(0)
    with pytest.raises(ValueError, match="n_blocks=0"):
        new_pool(model, 4, n_blocks=0)


@torch.no_grad()
def test_rows_of_a_pool_go_on_where_they_end() -> None:
    model = MODELS["qwen2"]
    cache = PagedCache(new_pool(model, 4), [Row(), Row()])
    model(token_ids(2, 3), cache=cache)
    with pytest.raises(ValueError, match=r"row 1 holds 3 tokens and goes on there, not with \[4\]"):
        model(token_ids(2, 1), positions=torch.tensor([[3], [4]]), cache=cache)
    with pytest.raises(ValueError, match="holds 2 rows, the tokens 3"):
        model(token_ids(3, 1), cache=cache)
    cache.reset()
    with pytest.raises(ValueError, match="has 2 rows, the tokens 3"):
        model(token_ids(3, 1), cache=cache)


@torch.no_grad()
def test_a_pool_without_room_for_copies_refuses_before_anything_changes() -> None:
    model = MODELS["qwen2"]
    pool = new_pool(model, 4, n_blocks=4)
    cache = PagedCache(pool)
    model(token_ids(1, 6), cache=cache)
    cache.repeat(4)  # three of them need a copy of the last block, two blocks are free
    state = [list(row.table) for row in cache.rows], list(pool.users)
    with pytest.raises(ValueError, match="3 more blocks are needed, 2 of the pool's 4 are free"):
        model(token_ids(4, 1), cache=cache)
    assert state == ([list(row.table) for row in cache.rows], list(pool.users))
    cache.select(torch.arange(3))
    model(token_ids(3, 1), cache=cache)
    assert not pool.free


# ------------------------------------------------------------------ what a review found


@torch.no_grad()
def test_a_pass_that_fails_leaves_nothing_to_share() -> None:
    model = MODELS["qwen2"]
    cache = PagedCache(new_pool(model, 4))
    model(token_ids(1, 4), cache=cache)
    with torch.enable_grad(), pytest.raises(ValueError, match="no gradients"):
        model(token_ids(1, 2), cache=cache)
    cache.repeat(2)
    rows = token_ids(2, 3, seed=5)
    got = torch.cat([model(rows[:, :2], cache=cache), model(rows[:, 2:], cache=cache)], dim=1)
    want = model(torch.cat([token_ids(1, 4).expand(2, -1), rows], dim=1))[:, 4:]
    torch.testing.assert_close(got, want, atol=1e-9, rtol=0)


@torch.no_grad()
def test_a_restricted_cache_is_as_strict_as_the_cache() -> None:
    model, idx = tiny_qwen2(), token_ids(1, 6)
    everything = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match="layer 0 sees all keys, the cache keeps window=4"):
        model(idx, cache=Restricted(SlidingCache(3, 4), everything))
    layered = Restricted(BufferCache([GrowingTrack(), GrowingTrack()], [1, 0, 1]), everything)
    torch.testing.assert_close(model(idx, cache=layered), model(idx), atol=5e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["growing", "static", "sliding"])
def test_reset_clears_what_was_not_a_number(kind: str) -> None:
    model = MODELS["qwen2, W = 3"]
    cache, idx = KINDS[kind](model), token_ids(1, 5)
    model(idx, cache=cache)
    for buffer in (*cache.keys, *cache.values):
        buffer.parts[0].fill_(torch.nan)
    cache.reset()
    positions = torch.arange(5)[None]
    torch.testing.assert_close(
        model(idx, positions=positions, cache=cache), model(idx), atol=1e-9, rtol=0
    )


@torch.no_grad()
def test_a_ring_knows_what_a_jump_has_pushed_out() -> None:
    model = tiny_qwen2(sliding_window=4, max_window_layers=0)
    cache = SlidingCache(3, 4, slack=2)
    model(token_ids(1, 5), positions=torch.tensor([[0, 1, 2, 3, 8]]), cache=cache)
    with pytest.raises(ValueError, match="only slack=2"):
        cache.crop(7)


@torch.no_grad()
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_only_whole_numbers_say_where_to_crop_and_what_to_select(kind: str) -> None:
    _, cache = filled(kind)
    for length in (2.5, True, 7 / 2, torch.tensor([1.0, 2.0])):
        with pytest.raises(ValueError, match="integer"):
            cache.crop(length)
    for rows in ([True, False], torch.tensor([1, 0], dtype=torch.uint8), [0.5]):
        with pytest.raises(ValueError, match="must be a list of rows below 2"):
            cache.select(torch.as_tensor(rows))
    cache.select([1, 0])  # a list will do
    assert cache.length == 7


def test_a_row_stands_once_in_a_batch() -> None:
    pool = new_pool(MODELS["qwen2"], 4)
    row = Row()
    with pytest.raises(ValueError, match="stands twice"):
        PagedCache(pool, [row, row])
    with pytest.raises(ValueError, match=r"length=10 is not in 0 ... 0"):
        pool.cut(row, 10)
    with pytest.raises(ValueError, match="block 9 is shared, but nobody uses it"):
        pool.share(9)
    with pytest.raises(ValueError, match="n_layer=0"):
        BlockPool(0, 1, 1, 1)


def test_a_wide_range_of_half_precision_is_quantised() -> None:
    x = torch.tensor([-40000.0, 40000.0, 1.0, 0.0]).half().reshape(1, 1, 1, 4)
    back = Quantized(8).decode(Quantized(8).encode(x))
    assert (back.float() - x.float()).abs().max() <= 80000 / 255 / 2 * 1.1


@pytest.mark.parametrize("kind", KINDS)
def test_R11_a_cache_that_inference_mode_filled_goes_on_outside(kind) -> None:
    model, idx = MODELS["qwen2, W = 3" if "sliding" in kind else "qwen2"], token_ids(2, 9)
    cache, swapped = KINDS[kind](model), idx[[1, 0]]
    with torch.inference_mode():
        model(idx[:, :4], cache=cache)
        cache.select(torch.tensor([1, 0]))
        model(swapped[:, 4:6], cache=cache)
    with torch.no_grad():
        if cache.slack != 0:
            cache.crop(5)
        got = model(swapped[:, cache.length :], cache=cache)
        tolerance = 2.0 if "bits" in kind else 1e-10
        assert (got - model(swapped)[:, -got.shape[1] :]).abs().max() < tolerance
        cache.reset()
        model(idx, cache=cache)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_P13_a_negative_length_takes_tokens_back_from_the_end_of_each_row(kind) -> None:
    model = MODELS["qwen2, W = 3" if "sliding" in kind else "qwen2"]
    idx, mask = token_ids(2, 7), torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    for positions in (None, positions_from_mask(mask)):
        cache = KINDS[kind](model)
        with torch.no_grad():
            model(idx, positions=positions, cache=cache)
            before = cache.lengths
            if cache.slack is not None and cache.slack < 2:
                continue
            cache.crop(-2)
            assert torch.equal(cache.lengths, before - 2)
            assert (cache.dense_length is None) == (positions is not None)
            with pytest.raises(ValueError, match="is not in 0"):
                cache.crop(-6)
