r"""A paged cache on a GPU: a kernel that writes into the pages, and attention that follows them.

:class:`~lm_from_scratch.cache.paged.PagedCache` gathers the keys and values of all rows into new
tensors before each attention. Gathered numbers are read, written, and read again by the attention:
three times the traffic of reading them where they lie. For one query per row, which does nothing
but read, that is three times the time.

Here :class:`KernelPagedCache` returns no tensors then, but :class:`Paged` handles: the memory of
the layer, and for each row the numbers of its pages and its length. :func:`paged_attention` runs
the kernel of :mod:`~lm_from_scratch.kernels.decoding`, which finds key :math:`s` in slot :math:`s
\bmod P` of page :math:`\text{table}[\lfloor s / P \rfloor]`. Slots that a row does not use are
never read, whatever they hold.

A page is what the pool calls a block: in a kernel a block is a tile.

Source: Kwon et al., *Efficient Memory Management for Large Language Model Serving with
PagedAttention*, 2023, arXiv:2309.06180.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lm_from_scratch.attention.visibility import PADDING, Visibility
from lm_from_scratch.cache.paged import PagedCache, PagedPlan
from lm_from_scratch.kernels.decoding import attend_in_splits, check_decoding
from lm_from_scratch.kernels.device import check_alike, check_device


@triton.jit(do_not_specialize=["T"])
def write_kernel(
    k, v, keys, values, slots, T, k_b, k_h, k_t, v_b, v_h, v_t,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The keys and values of one token, all heads, into one slot."""
    token = tl.program_id(0).to(tl.int64)
    b, t = token // T, token % T
    slot = tl.load(slots + token)
    h, d = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (h < H) & (d < D)
    there = (slot * H + h) * D + d
    if slot >= 0:
        new = tl.load(k + b * k_b + h * k_h + t * k_t + d, mask=inside)
        tl.store(keys + there, new, mask=inside)
        new = tl.load(v + b * v_b + h * v_h + t * v_t + d, mask=inside)
        tl.store(values + there, new, mask=inside)


def write_pages(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write new keys ``k`` and values ``v`` (B, Hkv, T, D) of a layer into its memory, ``keys`` and
    ``values`` (N, Hkv, D) of N slots.

    ``slots`` (B, T) says where each token goes; -1 where it goes nowhere. It must be below the
    number of slots, which is not checked, since reading it would make the GPU wait.
    """
    check_device("write_pages", k=k, v=v, keys=keys, values=values, slots=slots)
    check_alike("write_pages", k=k, v=v)
    check_alike("write_pages", keys=keys, values=values)
    B, H, T, D = k.shape
    if k.dtype != keys.dtype or keys.shape[1:] != (H, D):
        raise ValueError(
            f"write_pages: the pool holds (heads, D) = {tuple(keys.shape[1:])} in {keys.dtype}, "
            f"the new keys have {(H, D)} in {k.dtype}"
        )
    if slots.shape != (B, T) or slots.dtype != torch.int64:
        raise ValueError(
            f"write_pages: slots is {slots.dtype} of shape {tuple(slots.shape)}; it must be "
            f"int64 of shape {(B, T)}, one for each token of k"
        )
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("write_pages: keys and values must be contiguous: a copy is not the pool")
    write_into(k, v, keys, values, slots)


@torch.library.custom_op("lm_from_scratch::write_pages", mutates_args=("keys", "values"))
def write_into(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    B, H, T, D = k.shape
    write_kernel[(B * T,)](
        k, v, keys, values, slots.contiguous(), T, *k.stride()[:3], *v.stride()[:3],
        H=H, D=D, BLOCK_H=triton.next_power_of_2(H), BLOCK_D=triton.next_power_of_2(D),
    )  # fmt: skip


@write_into.register_fake
def _(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    return None


@dataclass(frozen=True, eq=False)
class Paged:
    """The keys, or the values, of some rows, where they lie. It is no tensor, and says so."""

    memory: Tensor  # (slots, Hkv, D) of one layer
    table: Tensor  # (B, pages) integers: the pages of each row, filled up with any number
    lengths: Tensor  # (B,) integers: what the query of a row sees, unless a window hides it
    page_size: int
    longest: int  # the largest that a length may be, known without reading them

    def gather(self) -> Tensor:
        """A copy as one tensor (B, Hkv, S, D). What a row has not is a copy of its first slot."""
        P, device = self.page_size, self.table.device
        inside = torch.arange(P, device=device)
        slots = (self.table.long()[:, :, None] * P + inside).flatten(1)  # (B, pages * P)
        held = torch.arange(self.longest, device=device) < self.lengths[:, None]
        read = torch.where(held, slots[:, : self.longest], slots[:, :1])  # (B, S)
        return self.memory[read].transpose(1, 2)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"these are pages of a KernelPagedCache, which have no .{name}: put paged_attention "
            "into the model (use_kernels_ does), or make a tensor of them with .gather()"
        )


def paged_attention(
    q: Tensor, k: Paged, v: Paged, visibility: Visibility, dropout: float = 0.0
) -> Tensor:
    """:func:`~lm_from_scratch.kernels.decoding.decode_attention` of ``q`` (B, H, 1, D) over keys
    that lie in pages.

    A query is the last token of its row, and sees all of them, or those in the window. ``k`` and
    ``v`` must hold the very same tensors as table and lengths: to compare their numbers would make
    the GPU wait. So the numbers of the pages are not checked either. Raises ``ValueError`` where
    they differ, for what pages cannot hide, and as
    :func:`~lm_from_scratch.kernels.decoding.check_decoding`.
    """
    if visibility.allowed is not None or visibility.key_documents is not None:
        raise ValueError(
            "paged_attention hides keys by lengths and window alone, but the visibility has "
            "`allowed` or documents: use decode_attention with k.gather() and v.gather()"
        )
    check_device("paged_attention", q=q, k=k.memory, v=v.memory, table=k.table, lengths=k.lengths)
    check_alike("paged_attention", k=k.memory, v=v.memory)
    check_tables(k, v)
    B, H, _, D = q.shape
    Hkv = k.memory.shape[1]
    if k.memory.shape[2] != D or H % Hkv != 0 or k.table.shape[0] != B:
        raise ValueError(
            f"paged_attention: q has (B, H, D) = {(B, H, D)}, the pages are of {len(k.table)} rows "
            f"and (Hkv, D) = {tuple(k.memory.shape[1:])}"
        )
    if visibility.key_length != k.longest:
        raise ValueError(
            f"paged_attention: the longest row has {k.longest} keys, the visibility is for "
            f"{visibility.key_length}"
        )
    check_decoding("paged_attention", q, k.memory, v.memory, dropout)
    return paged_forward(
        q, k.memory, v.memory, k.table, k.lengths, k.page_size, k.longest, visibility.window
    )


def check_tables(k: Paged, v: Paged) -> None:
    """Raises ``ValueError`` unless the kernel can follow the pages: a table that is too short
    would be read behind its end."""
    sizes, others = ((x.page_size, x.longest) for x in (k, v))
    if k.table is not v.table or k.lengths is not v.lengths or sizes != others:
        raise ValueError(
            "paged_attention: k and v must hold the same two tensors as table and lengths, and the "
            f"same page_size and longest; the latter are {sizes} in k, {others} in v"
        )
    for name, x in (("table", k.table), ("lengths", k.lengths)):
        if x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"paged_attention: {name} is {x.dtype}; it must be int32 or int64")
    rows, reach = k.table.shape[0], k.table.shape[1:].numel() * k.page_size
    if k.table.dim() != 2 or reach < k.longest or k.lengths.shape != (rows,):
        raise ValueError(
            f"paged_attention: table has shape {tuple(k.table.shape)}, lengths "
            f"{tuple(k.lengths.shape)}; they must be (rows, pages) and (rows,), and pages of "
            f"{k.page_size} must hold longest={k.longest} keys"
        )


@torch.library.custom_op("lm_from_scratch::paged_attention", mutates_args=())
def paged_forward(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    page_size: int,
    longest: int,
    window: int | None,
) -> Tensor:
    keys, values = keys.contiguous(), values.contiguous()  # as those of a pool are
    slot, head, _ = keys.stride()
    return attend_in_splits(
        q, keys, values, keys.shape[1], longest, window, strides=(0, head, slot) * 2,
        table=table.contiguous(), lengths=lengths.contiguous(), page_size=page_size,
    )  # fmt: skip


@paged_forward.register_fake
def _(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    page_size: int,
    longest: int,
    window: int | None,
) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


class KernelPlan(PagedPlan):
    """The same for the kernels, which follow the table themselves."""

    @cached_property
    def slots_or_padding(self) -> Tensor:
        """The slots of the new tokens, -1 for padding, (B, T)."""
        return torch.where(self.real, self.slots(self.queries), PADDING)

    @cached_property
    def pages(self) -> Tensor:
        """The blocks of each row, (B, most)."""
        return self.tables.int()

    @cached_property
    def lengths(self) -> Tensor:
        """How many keys each row sees, (B,): none where its only query is padding."""
        seen = [end if n else 0 for end, n in zip(self.ends, self.counts, strict=True)]
        return torch.tensor(seen, dtype=torch.int32, device=self.queries.device)


class KernelPagedCache(PagedCache):
    """A :class:`~lm_from_scratch.cache.paged.PagedCache` that copies nothing for one new token.

    A pass of one token for each row gets :class:`Paged` keys and values, for
    :func:`paged_attention`; a longer one, as for a prompt, gets gathered tensors, as before.
    """

    plan_type = KernelPlan

    def _store(self, plan: Any, layer: int, k: Tensor, v: Tensor) -> tuple[Any, Any]:
        memories = self.pool.keys[layer], self.pool.values[layer]
        write_pages(k, v, *memories, plan.slots_or_padding)
        if k.shape[2] > 1:
            return self.pool.gather(layer, plan.read)
        longest = plan.keys.shape[1]
        pages = [
            Paged(memory, plan.pages, plan.lengths, plan.block_size, longest) for memory in memories
        ]
        return pages[0], pages[1]
