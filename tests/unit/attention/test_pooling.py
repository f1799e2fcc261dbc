"""Blocks of tokens pooled to entries: by a loop over positions, in any order of the columns."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from lm_from_scratch.attention.pooling import blocks_of, completes, in_order, pool


def by_hand(positions, documents, values, gates, size, width):
    """The entries of a row, by document and position, and where each ends."""
    entries = []
    for document in sorted(set(documents.tolist())):
        own = {
            int(p): n for n, p in enumerate(positions) if p >= 0 and documents[n] == document
        }  # the column of each position
        D = values.shape[-1] * size // width
        for end in range(size - 1, max(own, default=-1) + 1, size):
            if all(p in own for p in range(end - size + 1, end + 1)):
                columns = [own.get(p) for p in range(end - width + 1, end + 1)]
                part = [0 if n < width - size else width - size and D for n in range(width)]
                pairs = [(c, f) for c, f in zip(columns, part) if c is not None]
                v = torch.stack([values[c, f : f + D] for c, f in pairs])
                z = torch.stack([gates[c, f : f + D] for c, f in pairs])
                entries.append((end, document, (z.softmax(0) * v).sum(0)))
    return entries


@examples(20, 60)
@given(size=st.integers(1, 4), overlap=st.booleans(), data=st.data(), seed=st.integers(0, 999))
def test_entries_are_those_of_a_loop(size: int, overlap: bool, data, seed: int) -> None:
    """Rows of several documents, with padding anywhere, in any order."""
    generator = torch.Generator().manual_seed(seed)
    width, A = size * (1 + overlap), 14
    rows = []
    for _ in range(2):
        cuts = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        tokens = [(p, d) for d, n in enumerate(cuts) for p in range(n)][:A]
        tokens += [(-1, 0)] * (A - len(tokens))
        rows.append(data.draw(st.permutations(tokens)))
    positions, documents = torch.tensor(rows).unbind(-1)
    values, gates = torch.randn(2, 2, A, 3 * (1 + overlap), generator=generator)
    values, gates = values.double(), gates.double()
    order = in_order(positions, documents)
    lines = torch.arange(2)[:, None]
    p, d, v, z = (x[lines, order] for x in (positions, documents, values, gates))
    complete = completes(p, d, size)
    blocks = blocks_of(complete, int(complete.sum(1).max()), p, d, width)
    entries = pool(v, z, blocks, size)
    for row in range(2):
        want = by_hand(positions[row], documents[row], values[row], gates[row], size, width)
        assert blocks.ends[row].tolist()[: len(want)] == [end for end, _, _ in want]
        assert (blocks.ends[row][len(want) :] == -1).all()
        for n, (_, document, entry) in enumerate(want):
            assert blocks.documents[row, n] == document
            torch.testing.assert_close(entries[row, n], entry)


def test_a_gap_leaves_a_block_out() -> None:
    positions = torch.tensor([[0, 1, 2, 4, 5, 6, 7]])
    complete = completes(positions, None, 4)
    assert complete[0].tolist() == [False] * 6 + [True]
    assert completes(torch.tensor([[0, 3]]), None, 4).any().item() is False


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_computed_in_float32(dtype: torch.dtype) -> None:
    positions = torch.arange(8)[None]
    complete = completes(positions, None, 4)
    blocks = blocks_of(complete, 2, positions, None, 4)
    values, gates = torch.randn(2, 1, 8, 5).to(dtype)
    entries = pool(values, gates, blocks, 4)
    want = pool(values.double(), gates.double(), blocks, 4)
    assert entries.dtype == dtype
    torch.testing.assert_close(entries.double(), want, rtol=0, atol=2 * torch.finfo(dtype).eps)
