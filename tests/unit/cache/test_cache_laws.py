"""The laws of caches, drawn at random over kinds, models and the ways to feed them.

A :class:`Twin` drives a cache and keeps the plain tokens of every row beside it. Whatever was done
before, the logits of the tokens that are fed must be those of each row alone, in one full pass. In
float64, so that the bound can be tight. The table:

    PYTHONPATH=tests/helpers python tests/unit/cache/test_cache_laws.py
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pytest
import torch
from caches import KINDS, MODELS, RoundTrip
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import token_ids

from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.cache.codec import Quantized
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.models.blocks import blocks

BOUND = 1e-9


class Twin:
    """A cache, and beside it the tokens that its rows should hold."""

    def __init__(self, kind: str, model, batch: int, seed: int) -> None:
        self.model, self.cache = model, KINDS[kind](model)
        codec = getattr(self.cache, "codec", None)
        self.oracle = RoundTrip(codec) if isinstance(codec, Quantized) else NO_CACHE
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.seed, self.error = seed, 0.0
        self.dense = True  # fed without positions so far

    def tokens(self, T: int) -> torch.Tensor:
        self.seed += 1
        return token_ids(len(self.rows), T, seed=self.seed)

    @torch.no_grad()
    def feed(self, mask: torch.Tensor | int) -> None:
        """So many tokens for all rows, or those columns of a mask (B, T) that are real."""
        if isinstance(mask, int):
            real = torch.ones(len(self.rows), mask, dtype=torch.bool)
        else:
            real = mask
        idx, positions = self.tokens(real.shape[1]), None
        if not (self.dense and isinstance(mask, int)):
            self.dense = False
            held = torch.tensor([len(row) for row in self.rows])[:, None]
            positions = positions_from_mask(real.long())
            positions = torch.where(real, positions + held, -1)
        logits = self.model(idx, positions=positions, cache=self.cache)
        for i, row in enumerate(self.rows):
            new = idx[i, real[i]].tolist()
            row += new
            if new:
                alone = self.model(torch.tensor([row]), cache=self.oracle)[0, -len(new) :]
                self.error = max(self.error, (logits[i, real[i]] - alone).abs().max().item())
        lengths = torch.tensor([len(row) for row in self.rows])
        assert self.cache.length == lengths.max()
        assert torch.equal(self.cache.lengths, lengths)


def feed_some(twin: Twin, data, most: int = 6) -> None:
    """Equal rows without positions, or rows with padding on the left, on the right and inside."""
    if twin.dense and data.draw(st.booleans()):
        twin.feed(data.draw(st.integers(1, most)))
    else:
        bits = st.lists(st.booleans(), min_size=most, max_size=most)
        mask = torch.tensor([data.draw(bits) for _ in twin.rows])
        mask[:, 0] |= torch.tensor([not row for row in twin.rows])  # no row stays empty
        twin.feed(mask)


def law_any_chunking(twin: Twin, data) -> None:
    """A full pass equals prefill and decode, and any other division."""
    for n in data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)):
        twin.feed(n)


def law_unequal_rows(twin: Twin, data) -> None:
    """Rows that end at different places, padded anywhere, are what they are alone."""
    for _ in range(data.draw(st.integers(1, 4))):
        feed_some(twin, data)


def law_crop(twin: Twin, data) -> None:
    """To crop and go on is never to have gone there, for one length and for one a row."""
    feed_some(twin, data)
    feed_some(twin, data)
    lengths = [len(row) for row in twin.rows]
    each = data.draw(st.booleans())
    if each:
        keep = [data.draw(st.integers(0, n)) for n in lengths]
    else:
        keep = [data.draw(st.integers(0, max(lengths)))] * len(lengths)
    wanted = torch.tensor(keep) if each else keep[0]
    try:
        twin.cache.crop(wanted)
    except ValueError as refused:
        back = max(n - k for n, k in zip(lengths, keep, strict=True))
        if "only slack=" not in str(refused) or twin.cache.slack is None or back < 1:
            raise
    else:
        twin.rows = [row[:k] for row, k in zip(twin.rows, keep, strict=True)]
        twin.dense = (twin.dense and not each) or not any(keep)


def law_select(twin: Twin, data) -> None:
    """Reordered, repeated and selected rows are what a fresh start with them would be."""
    feed_some(twin, data)
    B = len(twin.rows)
    rows = data.draw(st.lists(st.integers(0, B - 1), min_size=1, max_size=3))
    twin.cache.select(torch.tensor(rows))
    twin.rows = [list(twin.rows[i]) for i in rows]
    feed_some(twin, data, most=2)
    order = data.draw(st.permutations(range(len(rows))))
    twin.cache.reorder(torch.tensor(order))
    twin.rows = [list(twin.rows[i]) for i in order]
    times = data.draw(st.integers(1, 2))
    twin.cache.repeat(times)
    twin.rows = [list(row) for row in twin.rows for _ in range(times)]


def law_failed_pass(twin: Twin, data) -> None:
    """A pass that stops in any layer leaves the cache as it was."""
    feed_some(twin, data)
    before, dense = [list(row) for row in twin.rows], twin.dense
    block = data.draw(st.sampled_from(list(blocks(twin.model))))
    hook = block.register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            feed_some(twin, data)
    finally:
        hook.remove()
    twin.rows, twin.dense = before, dense
    assert twin.cache.lengths.tolist() == [len(row) for row in before]
    if data.draw(st.booleans()):
        times = data.draw(st.integers(1, 2))
        twin.cache.repeat(times)
        twin.rows = [list(row) for row in twin.rows for _ in range(times)]


def law_reset(twin: Twin, data) -> None:
    """After a reset the cache is new, for another batch too."""
    feed_some(twin, data)
    twin.cache.reset()
    assert twin.cache.length == 0 and twin.cache.batch is None
    twin.rows, twin.dense = [[] for _ in range(data.draw(st.integers(1, 4)))], True


def law_one_after_the_other(twin: Twin, data) -> None:
    """Two of these, in any order."""
    steps = [law_unequal_rows, law_crop, law_select, law_failed_pass, law_reset]
    for step in data.draw(st.lists(st.sampled_from(steps), min_size=2, max_size=2)):
        step(twin, data)


LAWS = {
    "any chunking": law_any_chunking,
    "unequal rows": law_unequal_rows,
    "crop": law_crop,
    "select": law_select,
    "failed pass": law_failed_pass,
    "reset": law_reset,
    "two of them": law_one_after_the_other,
}

#: For every kind and law: how many examples were drawn, and the largest error.
TABLE: dict[tuple[str, str], tuple[int, float]] = {}


def obeys(kind: str, law: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.data())
    def run(data) -> None:
        model = MODELS[data.draw(st.sampled_from([m for m in MODELS if KINDS[kind](MODELS[m])]))]
        twin = Twin(kind, model, data.draw(st.integers(1, 3)), data.draw(st.integers(0, 10**6)))
        LAWS[law](twin, data)
        twin.feed(1)
        twin.feed(1)
        count, worst = TABLE.get((kind, law), (0, 0.0))
        TABLE[kind, law] = count + 1, max(worst, twin.error)
        assert twin.error < BOUND

    run()


def each_with_each(
    kinds: Iterable[str],
    laws: Iterable[Any],
    examples: tuple[int, int],
    always: Collection[Any] = (),
) -> Iterator[Any]:
    """Every kind with every law, in few examples and in many. The quick tests have, in few, the
    laws that are ``always`` tried, and of the other pairs half: for each law other kinds."""
    few, many = examples
    for i, kind in enumerate(kinds):
        for j, law in enumerate(laws):
            name = f"{kind}-{getattr(law, '__name__', law)}"
            quick = law in always or (i + j) % 2 == 0
            marks = [] if quick else pytest.mark.slow
            yield pytest.param(kind, law, few, marks=marks, id=f"{name}-{few}")
            yield pytest.param(kind, law, many, marks=pytest.mark.slow, id=f"{name}-{many}")


#: "two of them" has the others as well.
EVERY_PAIR = each_with_each(KINDS, LAWS, (3, 30), always=("any chunking", "two of them"))


@pytest.mark.parametrize(("kind", "law", "examples"), [*EVERY_PAIR])
def test_every_kind_obeys_every_law(kind: str, law: str, examples: int) -> None:
    obeys(kind, law, examples)


def main() -> None:
    """The table of the laws, from more examples than the suite draws."""
    print(f"{'':22}" + "".join(f"{law:>16}" for law in LAWS))
    for kind in KINDS:
        for law in LAWS:
            obeys(kind, law, examples=60)
        cells = (TABLE[kind, law] for law in LAWS)
        print(f"{kind:22}" + "".join(f"{count:6}: {worst:8.1e}" for count, worst in cells))


if __name__ == "__main__":
    main()
