"""paged.py: rows share blocks of a pool until one of them writes."""

import pytest
import torch
from caches import MODELS
from caches import pool as new_pool
from tiny_models import token_ids

from lm_from_scratch.cache.paged import BlockPool, PagedCache, Row


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
