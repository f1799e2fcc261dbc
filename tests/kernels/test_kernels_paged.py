"""kernels/paged.py: written where the pool says, read by following the pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_checks import (
    DEVICE,
    Guarded,
    check,
    check_operator,
    each_dtype_of_which_float16_is_slow,
    numbers,
    poisoned,
)
from tiny_models import tiny_qwen2, token_ids
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lm_from_scratch.attention.kinds import ATTENTION_KINDS, attention_layers
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import PADDING, Visibility
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.paged import BlockPool, PagedCache
from lm_from_scratch.cache.restricted import Restricted
from lm_from_scratch.generation.engine import Engine
from lm_from_scratch.generation.requests import Request
from lm_from_scratch.kernels import decoding
from lm_from_scratch.kernels.paged import (
    KernelPagedCache,
    Paged,
    paged_attention,
    paged_forward,
    write_into,
    write_pages,
)


def poisoned_pool(n_layer: int = 3, n_blocks: int = 40, P: int = 4, **sizes: Any) -> BlockPool:
    """A pool of Qwen2's shape whose memory holds NaN until something is written."""
    sizes = dict(n_kv_head=2, head_dim=8) | sizes
    pool = BlockPool(n_layer, n_blocks=n_blocks, block_size=P, device=DEVICE, **sizes)
    for memory in (pool.keys, pool.values):
        memory.fill_(torch.nan)
    return pool


# -------------------------------------------------------------------------------------- the write


@each_dtype_of_which_float16_is_slow
@pytest.mark.parametrize("T", [1, 5])
def test_writes_what_indexing_writes(T: int, dtype: torch.dtype) -> None:
    B, H, D, n = 3, 2, 20, 40
    k, v = (numbers(B, H, T, D, seed=s, grad=False).to(DEVICE, dtype) for s in (0, 1))
    k = k.transpose(1, 2).contiguous().transpose(1, 2)  # as a projection lays it out
    slots = torch.randperm(n, generator=torch.Generator().manual_seed(0))[: B * T].to(DEVICE)
    slots = slots.view(B, T).clone()
    slots[1, 0] = PADDING
    real = slots >= 0
    want_keys, want_values = (torch.full((n, H, D), -7.0, device=DEVICE, dtype=dtype),) * 2
    want_keys, want_values = want_keys.clone(), want_values.clone()
    keys, values = Guarded(want_keys), Guarded(want_values)
    new_k, new_v = Guarded(k), Guarded(v)
    want_keys[slots[real]] = k.transpose(1, 2)[real]  # as PagedCache does
    want_values[slots[real]] = v.transpose(1, 2)[real]
    with poisoned():
        write_pages(new_k.tensor, new_v.tensor, keys.tensor, values.tensor, slots)
    assert torch.equal(keys.tensor, want_keys) and torch.equal(values.tensor, want_values)
    new_k.assert_untouched()
    new_v.assert_untouched()
    keys.assert_margins()
    values.assert_margins()


def test_write_takes_any_strides() -> None:
    k = numbers(2, 3, 5, 6, grad=False).float().to(DEVICE)
    keys = torch.zeros(12, 3, 6, device=DEVICE)
    values = torch.zeros_like(keys)
    slots = torch.arange(10, device=DEVICE).view(5, 2).T  # (B, T), not contiguous
    write_pages(k.mT.contiguous().mT, k[:, :1].expand(-1, 3, -1, -1), keys, values, slots)
    assert torch.equal(keys[slots].transpose(1, 2), k)
    assert torch.equal(values[slots].transpose(1, 2), k[:, :1].expand(-1, 3, -1, -1))


def test_write_is_one_operator() -> None:
    k = numbers(2, 2, 3, 8, grad=False).float().to(DEVICE)
    keys, values = torch.zeros(20, 2, 8, device=DEVICE), torch.zeros(20, 2, 8, device=DEVICE)
    check_operator(write_into, k, k, keys, values, torch.arange(6, device=DEVICE).view(2, 3))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(keys=(9, 2, 4)), "keys is torch.float32 of shape (9, 2, 4), values"),
        (dict(k=(2, 3, 1, 8), v=(2, 3, 1, 8)), "(heads, D) = (2, 8) in torch.float32, the new"),
        (dict(slots=(2,)), "slots is torch.int64 of shape (2,); it must be int64 of shape (2, 1)"),
    ],
)
def test_write_refuses(changes: dict[str, Any], words: str) -> None:
    shapes = dict(k=(2, 2, 1, 8), v=(2, 2, 1, 8), keys=(9, 2, 8), values=(9, 2, 8), slots=(2, 1))
    made = {
        name: torch.zeros(shape, dtype=torch.long if name == "slots" else None, device=DEVICE)
        for name, shape in (shapes | changes).items()
    }
    with pytest.raises(ValueError, match="write_pages: ") as error:
        write_pages(**made)
    assert words in str(error.value)


def test_write_refuses_a_pool_that_is_a_view() -> None:
    k, pool = torch.zeros(2, 2, 1, 8, device=DEVICE), torch.zeros(2, 9, 8, device=DEVICE)
    slots = torch.zeros(2, 1, dtype=torch.long, device=DEVICE)
    with pytest.raises(ValueError, match="must be contiguous: a copy is not the pool"):
        write_pages(k, k, pool.transpose(0, 1), pool.transpose(0, 1), slots)


# ---------------------------------------------------------------------------------- the attention


def scatter(x: Tensor, lengths: list[int], P: int) -> tuple[Tensor, Tensor]:
    """Rows (B, Hkv, S, D) in pages that lie in a random order, with NaN between and in them."""
    B, Hkv, S, D = x.shape
    most = -(-S // P)
    pages = torch.randperm(B * most + 2, generator=torch.Generator().manual_seed(0))
    table = pages[: B * most].view(B, most).int()
    memory = torch.full(((B * most + 2) * P, Hkv, D), torch.nan, dtype=x.dtype, device=x.device)
    for b, length in enumerate(lengths):
        for s in range(length):
            memory[int(table[b, s // P]) * P + s % P] = x[b, :, s]
        table[b, -(-length // P) :] = 1_000_000  # never followed
    return memory, table.to(x.device)


def paged(x: Tensor, lengths: list[int], P: int, like: Paged | None = None) -> Paged:
    """Values share the tables of their keys."""
    memory, table = scatter(x, lengths, P)
    if like is not None:
        return replace(like, memory=memory)
    held = torch.tensor(lengths, dtype=torch.int32, device=x.device)
    return Paged(memory, table, held, P, max(lengths))


def ragged(lengths: list[int], window: int | None = None) -> Visibility:
    ends = torch.tensor(lengths, device=DEVICE)[:, None]
    positions = torch.arange(max(lengths), device=DEVICE).expand(len(lengths), -1)
    return Visibility(ends - 1, torch.where(positions < ends, positions, PADDING), window=window)


@each_dtype_of_which_float16_is_slow
@pytest.mark.parametrize("window", [None, 1, 50, 90])
@pytest.mark.parametrize("P", [pytest.param(1, marks=pytest.mark.slow), 4, 16, 24])
def test_equals_the_reference(P: int, window: int | None, dtype: torch.dtype) -> None:
    """Rows of 150, 64, 1 and 0 keys: a split may be empty for one row and not for another."""
    lengths = [150, 64, 1, 0]
    q = numbers(4, 6, 1, 20, grad=False)
    k, v = (numbers(4, 2, 150, 20, seed=s, grad=False) for s in (1, 2))
    visibility = ragged(lengths, window)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = paged(k, lengths, P)
        return paged_attention(q, keys, paged(v, lengths, P, like=keys), visibility)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa_attention(q, k, v, visibility)

    check(attend, reference, q, k, v, dtype=dtype, name="paged_attention")


@pytest.mark.slow
def test_equals_unpaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a key lies changes no sum, whatever the number of splits."""
    q = numbers(2, 6, 1, 16, grad=False).float().to(DEVICE)
    k, v = (numbers(2, 2, 200, 16, seed=s, grad=False).float().to(DEVICE) for s in (1, 2))
    positions = torch.arange(200, device=DEVICE)[None]
    for splits in (1, 3, 4, 9):
        monkeypatch.setattr(decoding, "number_of_splits", lambda *_, splits=splits: splits)
        for window in (None, 130):
            dense = Visibility(positions[:, -1:], positions, window=window, dense=True)
            want = decoding.decode_attention(q, k, v, dense)
            keys = paged(k, [200] * 2, 8)
            got = paged_attention(q, keys, paged(v, [200] * 2, 8, like=keys), dense)
            torch.testing.assert_close(got, want)  # on a CPU bit by bit


def test_memory_is_not_written() -> None:
    q = numbers(2, 4, 1, 16, grad=False).float().to(DEVICE)
    k = paged(numbers(2, 2, 70, 16, grad=False).float().to(DEVICE), [70, 33], 16)
    guards = [Guarded(x) for x in (q, k.memory, k.memory, k.table, k.lengths)]
    with poisoned():
        y = paged_forward(*(guard.tensor for guard in guards), 16, 70, None)
    assert y.isfinite().all()
    for guard in guards:
        guard.assert_untouched()


def test_is_one_operator() -> None:
    q = numbers(2, 4, 1, 16, grad=False).float().to(DEVICE)
    k, v = (paged(torch.ones(2, 2, 9, 16, device=DEVICE), [9, 5], 4) for _ in range(2))
    for x in (k, v):
        x.memory.nan_to_num_(1.0)  # opcheck compares inputs, and NaN is not NaN
    check_operator(paged_forward, q, k.memory, v.memory, k.table, k.lengths, 4, 9, None)
    check_operator(paged_forward, q, k.memory, v.memory, k.table, k.lengths, 4, 9, 3)


def test_gather() -> None:
    x = numbers(2, 2, 9, 8, grad=False).float().to(DEVICE)
    lengths = [9, 5]
    handle = paged(x, lengths, 4)
    handle.table[handle.table == 1_000_000] = 0
    got = handle.gather()
    assert got.shape == x.shape and got.isfinite().all()
    for b, length in enumerate(lengths):
        assert torch.equal(got[b, :, :length], x[b, :, :length])


# -------------------------------------------------------------------------------------- the cache


def attend(q: Tensor, k: Any, v: Any, visibility: Visibility, dropout: float = 0.0) -> Tensor:
    function = paged_attention if isinstance(k, Paged) else sdpa_attention
    return function(q, k, v, visibility, dropout)


def model_with_pages(**changes: Any) -> Any:
    model = tiny_qwen2(**changes).to(DEVICE)
    for layer in attention_layers(model):
        layer.attend = attend
    return model


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("P", [1, 4, 16])
def test_generation_equals_paged_cache(P: int) -> None:
    """A ragged batch, then step by step across the edges of pages; the last layer slides."""
    kinds = ("full_attention", "full_attention", "sliding_attention")
    changes: dict[str, Any] = dict(sliding_window=7, layer_types=kinds)
    idx = token_ids(2, 24).to(DEVICE)
    positions = torch.arange(24, device=DEVICE).expand(2, -1).clone()
    positions[1] = (positions[1] - 6).clamp(min=PADDING)  # left padding, 6 tokens
    logits = []
    for model, cache in (
        (tiny_qwen2(**changes).to(DEVICE), PagedCache(poisoned_pool(n_blocks=60, P=P))),
        (model_with_pages(**changes), KernelPagedCache(poisoned_pool(n_blocks=60, P=P))),
    ):
        steps = [model(idx[:, :14], positions=positions[:, :14], cache=cache, keep=slice(-1, None))]
        for t in range(14, 24):
            steps.append(model(idx[:, t : t + 1], positions=positions[:, t : t + 1], cache=cache))
        logits.append(torch.cat(steps, dim=1))
        assert cache.lengths.tolist() == [24, 18]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_forks_share_pages_and_do_not_disturb_one_another() -> None:
    """One prompt, three continuations of it, then two of these chosen again, as beams are."""
    model, idx = model_with_pages(), token_ids(1, 10).to(DEVICE)
    plain, said = tiny_qwen2().to(DEVICE), token_ids(3, 6, seed=2).to(DEVICE)
    cache = KernelPagedCache(poisoned_pool(P=4))
    other = GrowingCache(3)
    for net, held in ((model, cache), (plain, other)):
        net(idx, cache=held)
        held.repeat(3)
    blocks = cache.pool.users.count(0)
    for t in range(3):
        got = model(said[:, t : t + 1], cache=cache)
        want = plain(said[:, t : t + 1], cache=other)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert blocks - cache.pool.users.count(0) == 5  # two copies of the last page, three new ones
    rows = torch.tensor([2, 0, 2])
    cache.select(rows)
    other.select(rows.to(DEVICE) if DEVICE == "cuda" else rows)
    for t in range(3, 6):
        got = model(said[:, t : t + 1], cache=cache)
        want = plain(said[:, t : t + 1], cache=other)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_after_a_crop_the_row_goes_on() -> None:
    model, plain, idx = model_with_pages(), tiny_qwen2().to(DEVICE), token_ids(2, 12).to(DEVICE)
    cache = KernelPagedCache(poisoned_pool(P=4))
    model(idx, cache=cache)
    cache.crop(7)
    got = model(idx[:, 7:8], cache=cache)[:, -1]
    torch.testing.assert_close(got, plain(idx[:, :8])[:, -1], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_row_may_pause() -> None:
    """A row whose token is padding: it sees nothing, keeps what it holds, and writes nothing."""
    model, plain, idx = model_with_pages(), tiny_qwen2().to(DEVICE), token_ids(2, 8).to(DEVICE)
    cache, other = KernelPagedCache(poisoned_pool(P=4)), PagedCache(poisoned_pool(P=4))
    places = torch.tensor([[6], [PADDING]], device=DEVICE)
    logits = []
    for net, held in ((model, cache), (plain, other)):
        net(idx[:, :6], cache=held)
        logits.append(net(idx[:, 6:7], positions=places, cache=held))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    assert cache.lengths.tolist() == [7, 6]
    got = model(
        idx[:, 6:7].flip(0), positions=torch.tensor([[7], [6]], device=DEVICE), cache=cache
    )[1]
    want = plain(torch.cat([idx[1:, :6], idx[:1, 6:7]], dim=1))[0, -1:]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_an_engine_says_the_same() -> None:
    """Requests of several lengths that share a beginning, join and leave, over pages of 4."""
    prompts = [token_ids(n, seed=3).tolist() for n in (9, 14, 5)]
    prompts[1][:9] = prompts[0]
    results = []
    for model, cache in ((tiny_qwen2(), PagedCache), (model_with_pages(), KernelPagedCache)):
        engine = Engine(
            model.to(DEVICE), poisoned_pool(P=4), max_batch=2, prefill_chunk=8, cache_type=cache
        )
        for prompt in prompts:
            engine.submit(Request(prompt=prompt, max_new_tokens=5))
        for _ in engine.run():
            pass
        results.append(engine.results)
    assert results[0] == results[1] and len(results[0]) == 3


@torch.no_grad()
@pytest.mark.parametrize("kind", sorted(ATTENTION_KINDS))
def test_other_attention_says_what_to_use(kind: str) -> None:
    model, idx = tiny_qwen2().to(DEVICE), token_ids(1, 5).to(DEVICE)
    cache = KernelPagedCache(poisoned_pool())
    model(idx, cache=cache)
    for layer in attention_layers(model):
        layer.attend = ATTENTION_KINDS[kind]
    with pytest.raises(AttributeError, match=r"pages of a KernelPagedCache.*\.gather\(\)"):
        model(idx[:, :1], cache=cache)
    for name in ("__array__", "shape"):  # protocols may ask for what they like
        assert not hasattr(Paged(idx, idx, idx, 4, 4), name)


@torch.no_grad()
def test_refuses() -> None:
    model, idx = model_with_pages(), token_ids(1, 5).to(DEVICE)
    cache = KernelPagedCache(poisoned_pool())
    model(idx, cache=cache)
    allowed = torch.ones(1, 1, 1, 6, dtype=torch.bool, device=DEVICE)
    with pytest.raises(ValueError, match="`allowed` or documents: use decode_attention with"):
        model(idx[:, :1], cache=Restricted(cache, allowed))
    cache = KernelPagedCache(poisoned_pool(head_dim=6))
    with pytest.raises(ValueError, match=r"the pool holds \(heads, D\) = \(2, 6\)"):
        model(idx, cache=cache)
    k = paged(torch.ones(2, 2, 9, 16, device=DEVICE), [9, 5], 4)
    for q, visibility, words in [
        (torch.ones(3, 4, 1, 16), ragged([9, 5]), "pages are of 2 rows"),
        (torch.ones(2, 3, 1, 16), ragged([9, 5]), r"\(Hkv, D\) = \(2, 16\)"),
        (torch.ones(2, 4, 1, 16), ragged([8, 5]), "has 9 keys, the visibility is for 8"),
        (torch.ones(2, 4, 2, 16), ragged([9, 5]), "T=2 queries in a row, the kernel takes 1"),
        (torch.ones(2, 4, 1, 16).half(), ragged([9, 5]), "q is torch.float16, k torch.float32"),
    ]:
        with pytest.raises(ValueError, match=words):
            paged_attention(q.to(DEVICE), k, k, visibility)
    with torch.enable_grad(), pytest.raises(ValueError, match=r"under torch\.no_grad\(\)"):
        paged_attention(
            torch.ones(2, 4, 1, 16, device=DEVICE).requires_grad_(), k, k, ragged([9, 5])
        )


@pytest.mark.parametrize(
    ("keys", "values", "words"),
    [
        (dict(table=(2, 2)), {}, r"table has shape \(2, 2\).* pages of 4 must hold longest=9 keys"),
        (dict(table=(2, 3, 4)), {}, r"table has shape \(2, 3, 4\)"),
        (dict(lengths=(1,)), {}, r"lengths \(1,\); they must be \(rows, pages\) and \(rows,\)"),
        (dict(lengths=(3,)), {}, r"lengths \(3,\)"),
        (dict(lengths=()), {}, r"lengths \(\)"),
        (dict(table=torch.float32), {}, "table is torch.float32; it must be int32 or int64"),
        (dict(lengths=torch.bool), {}, "lengths is torch.bool; it must be int32 or int64"),
        (dict(page_size=-4), {}, "pages of -4 must hold longest=9 keys"),
        ({}, dict(table=(2, 3)), "k and v must hold the same two tensors"),
        ({}, dict(lengths=(2,)), "k and v must hold the same two tensors"),
        ({}, dict(page_size=8), r"the latter are \(4, 9\) in k, \(8, 9\) in v"),
        ({}, dict(longest=8), r"the latter are \(4, 9\) in k, \(4, 8\) in v"),
    ],
)
def test_refuses_what_cannot_be_followed(
    keys: dict[str, Any], values: dict[str, Any], words: str
) -> None:
    """Whatever would be read behind its end, or not as it says."""

    def changed(handle: Paged, changes: dict[str, Any]) -> Paged:
        made = dict(changes)
        for name in {"table", "lengths"} & set(changes):
            to, held = changes[name], getattr(handle, name)
            typed = isinstance(to, torch.dtype)
            made[name] = held.to(to) if typed else torch.zeros(to, dtype=held.dtype, device=DEVICE)
        return replace(handle, **made)

    k = changed(paged(torch.ones(2, 2, 9, 16, device=DEVICE), [9, 5], 4), keys)
    with pytest.raises(ValueError, match=words):
        paged_attention(
            torch.ones(2, 4, 1, 16, device=DEVICE), k, changed(k, values), ragged([9, 5])
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_above_the_longest_are_cut(dtype: torch.dtype) -> None:
    """They cannot be refused without reading them; nothing behind the table is read."""
    q = numbers(2, 4, 1, 16, grad=False).float().to(DEVICE)
    k = paged(numbers(2, 2, 9, 16, grad=False).float().to(DEVICE), [9, 9], 4)
    k = replace(k, table=k.table.to(dtype), lengths=k.lengths.to(dtype))
    long = replace(k, lengths=k.lengths + 1_000_000)
    want = paged_attention(q, k, k, ragged([9, 9]))
    assert want.isfinite().all()
    assert torch.equal(paged_attention(q, long, long, ragged([9, 9])), want)


class Calls(TorchDispatchMode):
    """What is called, with the shape of the result, and whether a tensor of booleans selects."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []
        self.selected: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.seen.append((name, tuple(getattr(out, "shape", ()))))
        indices = (
            args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        )
        by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        if by_mask or name in ("nonzero", "masked_select", "_local_scalar_dense"):
            self.selected.append(name)
        return out


@torch.no_grad()
@pytest.mark.parametrize("T", [1, 3])
def test_no_index_is_boolean(T: int) -> None:
    """Such an index makes a GPU wait; and one token needs no slots of all keys."""
    held = {}
    for cache_type in (PagedCache, KernelPagedCache):
        cache = cache_type(poisoned_pool(P=4, n_layer=1))
        old, new = (torch.ones(2, 2, n, 8, device=DEVICE) for n in (9, T))
        cache.see(old[:, 0])
        cache[0].update(old, old)
        with Calls() as calls:
            cache.see(new[:, 0])
            cache[0].update(new, new)
        held[cache_type] = calls
    assert held[PagedCache].selected  # so it can be seen
    assert not held[KernelPagedCache].selected
    gathers = [shape for name, shape in held[KernelPagedCache].seen if name == "gather"]
    assert gathers == ([(2, 1)] if T == 1 else [(2, T), (2, 9 + T)])
