"""cache: full forward == prefill + decode == any chunking, and clear errors."""

import pytest
import torch
from conftest import tiny_gpt2, token_ids
from hypothesis import given
from hypothesis import strategies as st

from lm_from_scratch.cache import NO_CACHE, GrowingCache, KVCache
from lm_from_scratch.data import padded_batch
from lm_from_scratch.visibility import positions_from_mask

MODEL = tiny_gpt2()


@torch.no_grad()
def in_chunks(idx, chunks, positions=None, model=MODEL) -> torch.Tensor:
    cache, outputs, start = GrowingCache(model.config.n_layer), [], 0
    for n in chunks:
        part = None if positions is None else positions[:, start : start + n]
        outputs.append(model(idx[:, start : start + n], part, cache=cache))
        start += n
    assert start == idx.shape[1] == cache.length
    return torch.cat(outputs, dim=1)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 10**6))
def test_full_equals_any_chunking(chunks: list[int], seed: int) -> None:
    idx = token_ids(2, sum(chunks), seed=seed)
    torch.testing.assert_close(in_chunks(idx, chunks), MODEL(idx), atol=2e-5, rtol=0)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.sampled_from(["left", "right"]))
def test_unequal_rows_in_chunks_equal_each_row_alone(lengths: list[int], side: str) -> None:
    rows = [token_ids(n, seed=i).tolist() for i, n in enumerate(lengths)]
    batch = padded_batch(rows, pad_token_id=0, side=side)
    total = batch.idx.shape[1]
    chunks = [min(3, total - i) for i in range(0, total, 3)]
    logits = in_chunks(batch.idx, chunks, batch.positions)
    for i, row in enumerate(rows):
        alone = MODEL(torch.tensor([row]))
        real = logits[i][batch.positions[i] >= 0]
        torch.testing.assert_close(real, alone[0], atol=2e-5, rtol=0)


def test_G1_G2_G3_G4_chunks_with_a_past_see_the_right_keys_at_the_right_positions() -> None:
    """5, 1, 3, 3: the historic code raised, then fed tokens twice, then restarted positions."""
    idx = token_ids(2, 12)
    torch.testing.assert_close(in_chunks(idx, (5, 1, 3, 3)), MODEL(idx), atol=2e-5, rtol=0)


def test_G3_the_cache_grows_by_the_tokens_that_are_fed() -> None:
    cache, lengths = GrowingCache(MODEL.config.n_layer), []
    with torch.no_grad():
        for n in (6, 1, 1, 1):
            MODEL(token_ids(1, n), cache=cache)
            lengths.append((cache.length, cache.positions.shape[1]))
    assert lengths == [(6, 6), (7, 7), (8, 8), (9, 9)]


def test_G4_positions_continue_after_the_cache() -> None:
    cache = GrowingCache(MODEL.config.n_layer)
    with torch.no_grad():
        MODEL(token_ids(1, 5), cache=cache)
        visibility = cache.see(token_ids(1, 2), None, None, MODEL.config.n_layer)
    assert visibility.query_positions.tolist() == [[5, 6]]
    assert visibility.key_positions.tolist() == [list(range(7))]


def one_layer(cache: KVCache, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A pass through a cache with one layer and without a model."""
    cache.see(k[:, 0], None, None, 1)
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
        MODEL(token_ids(1, 4), positions_from_mask(torch.tensor([[0, 1, 1, 1]])), cache=cache)
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
            MODEL(idx[:, :4], part, cache=cache)
            with pytest.raises(IndexError):
                MODEL(torch.tensor([[5, 97]]), cache=cache) if part is None else MODEL(
                    torch.tensor([[5, 97]]), positions[:, 4:6], cache=cache
                )
            with pytest.raises(ValueError, match="block_size"):
                far = torch.tensor([[500]])
                MODEL(idx[:, :1], far, cache=cache)
            with pytest.raises(ValueError, match="holds 1 rows, the tokens 2"):
                MODEL(token_ids(2, 1), cache=cache)
            assert cache.length == 4
            rest = None if positions is None else positions[:, 4:]
            got = MODEL(idx[:, 4:], rest, cache=cache)
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
        MODEL(idx[:, 4:6], torch.tensor([[4, 5]]), cache=cache)
        with pytest.raises(ValueError, match="positions are needed"):
            MODEL(idx[:, 6:7], cache=cache)
        got = MODEL(idx[:, 6:], torch.tensor([[6, 7, 8]]), cache=cache)
    torch.testing.assert_close(got, MODEL(idx)[:, 6:], atol=2e-5, rtol=0)


def test_documents_need_positions_of_the_right_kind() -> None:
    idx, positions = token_ids(2, 4), torch.tensor([[0, 1, 0, 1]] * 2)
    with pytest.raises(ValueError, match="documents need positions"):
        MODEL(idx, documents=positions)
    with pytest.raises(ValueError, match=r"shape \(1, 4\)"):
        MODEL(idx, positions, positions[:1])
    with pytest.raises(ValueError, match="integers of shape"):
        MODEL(idx, positions, positions.float())
    with pytest.raises(ValueError, match="at least one"):
        MODEL(idx[:, :0])
    assert torch.equal(MODEL(idx, positions.to(torch.int16)), MODEL(idx, positions))
