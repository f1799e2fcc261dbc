"""A growing cache: what a pass asks it for, in a sequence of calls."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer, normal

Cache = Any  # what the student writes
Pairs = Sequence[tuple[Tensor, Tensor]]


class Reference:
    """The package's cache with the methods of this exercise."""

    def __init__(self, n_layer: int) -> None:
        self.cache = GrowingCache(n_layer)

    @property
    def length(self) -> int:
        return self.cache.length

    def see(self, T: int) -> tuple[Tensor, Tensor]:
        keys = torch.arange(self.length + T)[None]
        seen = Visibility(keys[:, self.length :], keys, dense=True)
        return seen.query_positions[0], seen.mask[0, 0]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer == 0:
            self.cache.see(k[:, 0, :, 0], windows=self.cache.windows)
        return self.cache[layer].update(k.detach(), v.detach())

    def crop(self, length: int) -> None:
        self.cache.crop(length)

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)

    def reset(self) -> None:
        self.cache.reset()


# -------------------------------------------------------------------------------- how it is used


def snapshot(value: Any) -> Any:
    """A copy, whatever it is: later calls may write into what was returned."""
    return value.clone() if isinstance(value, Tensor) else value


def named(result: Any, first: str, second: str) -> Any:
    """The two parts of a result under their names, if there are two."""
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return {first: snapshot(result[0]), second: snapshot(result[1])}
    return result


def feed(cache: Cache, layers: Pairs, start: int, end: int, where: str = "") -> dict[str, Any]:
    """One pass over the tokens from start to end - 1; what every layer returns."""
    results = {}
    for number, (k, v) in enumerate(layers):
        result = cache.update(number, k[:, :, start:end], v[:, :, start:end])
        place = f"of layer {number} after {end} tokens{where}"
        results[f"update {place}"] = named(result, f"the keys {place}", f"the values {place}")
    return results


def pieces(make: Callable[..., Cache], n_layer: int, layers: Pairs, sizes: Sequence[int]) -> Any:
    cache, at = make(n_layer), 0
    results: dict[str, Any] = {}
    for size in sizes:
        results |= feed(cache, layers, at, at + size)
        at += size
        results[f"length after {at} tokens"] = cache.length
    return results


def sight(make: Callable[..., Cache], n_layer: int, layers: Pairs, sizes: Sequence[int]) -> Any:
    cache, at = make(n_layer), 0
    results: dict[str, Any] = {"length of an empty cache": cache.length}
    for size in sizes:
        new = f"of {size} tokens after {at}"
        cache.see(size + 1)  # a look that changes nothing
        results[f"see, {new}"] = named(cache.see(size), f"the positions {new}", f"the mask {new}")
        feed(cache, layers, at, at + size)
        at += size
    return results


def whole_passes(
    make: Callable[..., Cache], n_layer: int, layers: Pairs, sizes: Sequence[int]
) -> Any:
    cache, at = make(n_layer), 0
    results: dict[str, Any] = {}
    for size in sizes:
        end = at + size
        for number, (k, v) in enumerate(layers):
            result = cache.update(number, k[:, :, at:end], v[:, :, at:end])
            place = f"of layer {number} after {end} tokens"
            results[f"update {place}"] = named(result, f"the keys {place}", f"the values {place}")
            results[f"length, tokens {at} to {end - 1}, after layer {number}"] = cache.length
        at = end
    return results


def broken_off(make: Callable[..., Cache], n_layer: int, layers: Pairs, junk: Pairs) -> Any:
    cache = make(n_layer)
    feed(cache, layers, 0, 4)
    for number, (k, v) in enumerate(junk):  # not all layers
        cache.update(number, k, v)
    results: dict[str, Any] = {"length after the pass that stopped": cache.length}
    results["see(2) after the pass that stopped"] = named(cache.see(2), "the positions", "the mask")
    results |= feed(cache, layers, 4, 6, ", a pass stopped at 4")
    results |= feed(cache, layers, 6, 7, ", a pass stopped at 4")
    return results | at_once(make, n_layer, layers, junk)


def at_once(make: Callable[..., Cache], n_layer: int, layers: Pairs, junk: Pairs) -> Any:
    """Rows are selected, or tokens forgotten, right after a pass that stopped."""
    results: dict[str, Any] = {}
    rows = torch.arange(layers[0][0].shape[0]).flip(0)
    for word, do in (("select", lambda c: c.select(rows)), ("crop(3)", lambda c: c.crop(3))):
        cache = make(n_layer)
        feed(cache, layers, 0, 4)
        for number, (k, v) in enumerate(junk):
            cache.update(number, k, v)
        do(cache)
        results[f"length after {word} after the pass that stopped"] = length = cache.length
        went_on = [(k[rows], v[rows]) for k, v in layers] if word == "select" else layers
        results |= feed(cache, went_on, length, length + 2, f", {word} after a pass that stopped")
    return results


def long_text(make: Callable[..., Cache], n_layer: int, layers: Pairs) -> Any:
    """More tokens than any limit that nobody asked for."""
    cache, S = make(n_layer), layers[0][0].shape[2]
    feed(cache, layers, 0, S - 9)
    results: dict[str, Any] = {"length": cache.length}
    return results | feed(cache, layers, S - 9, S) | {"length at the end": cache.length}


def selected(make: Callable[..., Cache], n_layer: int, layers: Pairs, rows: Tensor) -> Any:
    cache = make(n_layer)
    feed(cache, layers, 0, 5)
    cache.select(rows.clone())
    chosen = [(k[rows], v[rows].flip(0)) for k, v in layers]  # rows that part from here on
    results = {"length after select": cache.length} | feed(cache, chosen, 5, 6, " and select")
    cache.select(torch.tensor([1]))
    one = [(k[1:2], v[1:2]) for k, v in chosen]
    return results | feed(cache, one, 6, 7, " and select twice")


def cropped(make: Callable[..., Cache], n_layer: int, layers: Pairs, others: Pairs) -> Any:
    cache = make(n_layer)
    feed(cache, others, 0, 6)
    cache.crop(2)
    results: dict[str, Any] = {"length after crop(2)": cache.length}
    results |= feed(cache, layers, 2, 5, ", crop(2) after 6")
    cache.crop(0)
    return results | {"length after crop(0)": cache.length} | feed(cache, layers, 0, 1, ", crop(0)")


def forgotten(make: Callable[..., Cache], n_layer: int, layers: Pairs, others: Pairs) -> Any:
    cache = make(n_layer)
    feed(cache, others, 0, 6)
    cache.reset()
    results: dict[str, Any] = {"length after reset()": cache.length}
    return results | feed(cache, layers, 0, 3, ", reset() before")


def refused(make: Callable[..., Cache], n_layer: int, layers: Pairs) -> Any:
    cache = make(n_layer)
    feed(cache, layers, 0, 3)
    (k, v), two = layers[0], slice(3, 5)
    k, v = k[:, :, two], v[:, :, two]
    tries: dict[str, tuple[Any, ...]] = {
        f"layer {n_layer} of {n_layer}": (n_layer, k, v),
        "layer -1": (-1, k, v),
        "keys with fewer rows": (0, k[:1], v[:1]),
        "keys and values in float64": (0, k.double(), v.double()),
        "good keys, values in float64": (0, k, v.double()),
    }
    results: dict[str, Any] = {}
    for name, arguments in tries.items():
        try:
            cache.update(*arguments)
            results[name] = "is accepted"
        except ValueError:
            results[name] = "raises ValueError"
    results["length after refusals"] = cache.length
    results |= feed(cache, layers, 3, 5, ", after refusals")
    return results | refused_within(cache, layers)


def refused_within(cache: Cache, layers: Pairs) -> Any:
    """The last layer refuses its pairs once, in a pass that then goes on."""
    *first, (k, v) = [(k[:, :, 5:7], v[:, :, 5:7]) for k, v in layers]
    feed(cache, first, 0, 2)
    results: dict[str, Any] = {}
    for name, pair in (("rows", (k[:1], v[:1])), ("dtype", (k.double(), v.double()))):
        try:
            cache.update(len(first), *pair)
            results[f"another {name} in the last layer"] = "is accepted"
        except ValueError:
            results[f"another {name} in the last layer"] = "raises ValueError"
    cache.update(len(first), k, v)
    results["length after a refusal within a pass"] = cache.length
    return results | feed(cache, layers, 7, 8, ", a refusal within the pass before")


def own_memory(make: Callable[..., Cache], n_layer: int, layers: Pairs) -> Any:
    cache, other = make(n_layer), make(n_layer)
    mine = [(k[:, :, :2].clone(), v[:, :, :2].clone()) for k, v in layers]
    feed(cache, mine, 0, 2)
    theirs = [(k[:, :, 5:], v[:, :, 5:]) for k, v in layers]  # another text
    for k, v in mine:  # the caller's buffers are used again
        k.zero_(), v.zero_()
    return feed(cache, layers, 2, 3, ", the caller's k and v overwritten") | {
        "length of another cache": other.length,
        **feed(other, theirs, 0, 1, " of another cache"),
        **feed(cache, layers, 3, 4, ", another cache in use"),
    }


def without_graph(make: Callable[..., Cache], n_layer: int, layers: Pairs) -> Any:
    cache, results = make(n_layer), {}
    leaves = [(k.clone().requires_grad_(), v.clone().requires_grad_()) for k, v in layers]
    for at in range(2):
        for number, (k, v) in enumerate(leaves):
            pair = cache.update(number, k[:, :, at : at + 1], v[:, :, at : at + 1])
            for name, part in zip(("keys", "values"), pair, strict=True):
                results[f"the {name} of step {at} require a gradient"] = part.requires_grad
    return results


# ------------------------------------------------------------------------------------- arguments


def text(
    g: Generator, n_layer: int, n: int = 10, B: int = 2, dtype: torch.dtype = torch.float32
) -> Pairs:
    """Keys (B, 3, n, 4) and values (B, 3, n, 5) for every layer."""
    sizes = (B, 3, n, 4), (B, 3, n, 5)
    return [tuple(normal(g, *size, dtype=dtype) for size in sizes) for _ in range(n_layer)]  # type: ignore[misc]


def one_layer(g: Generator) -> Call:
    return call(n_layer=1, layers=text(g, 1), sizes=[5, 1, 1, 3])


def chosen_rows(g: Generator) -> Call:
    keep = integer(g, 0, 2)  # a row that is there twice, and not in its own place
    rows = torch.tensor([2, 2, keep, 2])
    return call(n_layer=2, layers=text(g, 2, B=3), rows=rows)


def two_texts(g: Generator) -> Call:
    layers, others = text(g, 2), text(g, 2)
    others = [
        (torch.cat([k[:, :, :2], a[:, :, 2:]], 2), torch.cat([v[:, :, :2], b[:, :, 2:]], 2))
        for (k, v), (a, b) in zip(layers, others, strict=True)
    ]
    return call(n_layer=2, layers=layers, others=others)


def another_batch(g: Generator) -> Call:
    layers = text(g, 2, B=3, dtype=torch.float64)
    return call(n_layer=2, layers=layers, others=text(g, 2))


def two_plain(g: Generator) -> Call:
    return call(n_layer=2, layers=text(g, 2))


class Buffers(Reference):
    """Room for many tokens from the start; a count for each layer."""

    def __init__(self, n_layer: int) -> None:
        self.n_layer, self.room = n_layer, 4096
        self.reset()

    def reset(self) -> None:
        self.buffers: list[list[Tensor] | None] = [None] * self.n_layer
        self.counts = [0] * self.n_layer

    @property
    def length(self) -> int:
        return self.counts[-1]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in range(self.n_layer):
            raise ValueError(layer)
        start, end = self.length, self.length + k.shape[2]
        buffers = self.buffers[layer]
        if buffers is None:
            buffers = [x.new_zeros(*x.shape[:2], self.room, x.shape[3]) for x in (k, v)]
        for buffer, x in zip(buffers, (k, v), strict=True):
            if buffer.shape[0] != x.shape[0] or buffer.dtype != x.dtype:
                raise ValueError(f"{x.shape} {x.dtype}")
        for buffer, x in zip(buffers, (k, v), strict=True):
            buffer[:, :, start:end] = x.detach()
        self.buffers[layer], self.counts[layer] = buffers, end
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def crop(self, length: int) -> None:
        self.counts = [min(count, length) for count in self.counts]

    def select(self, rows: Tensor) -> None:
        self.buffers = [b if b is None else [x.index_select(0, rows) for x in b]
                        for b in self.buffers]  # fmt: skip


# ------------------------------------------------------------------------------- wrong answers


class OneStore(Buffers):
    """A count for each cache, but one store for all."""

    store: dict[int, list[Tensor] | None] = {}  # noqa: RUF012

    def reset(self) -> None:
        self.buffers = self.store  # type: ignore[assignment]
        self.store.update(dict.fromkeys(range(self.n_layer)))
        self.counts = [0] * self.n_layer


RESET = "self.held: list[list[Tensor]] = [[] for _ in range(self.n_layer)]"
CROP = "[[x[:, :, :length] for x in pair] for pair in self.held]"
SELECT = "[[x[rows] for x in pair] for pair in self.held]"
WHOLE = "old[:, :, :held]"
KEPT = "(old if self.held[layer] else old[:, :, :0])"
CHECK = "if any(len(old) != len(x) or old.dtype != x.dtype for old, x in pairs):"
RETURN = "self.held[layer] = [keys, values]\n        return keys, values"
MASK = "return positions, keys <= positions[:, None]"
RANGE = "if not 0 <= layer < self.n_layer:"
NEW = "new = [k.detach(), v.detach()]"

POSITIONS = "positions and mask, pieces of 5, 1, 1, 3"
KEYS, LAYERS = "keys and values, pieces of 5, 1, 1, 3", "two layers, length within a pass"
HALF_WAY, ROWS, CROPPED = "a pass that stops half-way", "rows are selected", "crop, and go on"
REFUSED, MEMORY = "what is refused, and leaves no trace", "its own memory"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the positions of each piece start at 0",
     {MASK: "return torch.arange(T), keys <= positions[:, None]"}, POSITIONS),
    ("the mask is laid at the first key, not at the last",
     {MASK: "return positions, keys <= torch.arange(T)[:, None]"}, POSITIONS),
    ("positions and mask both begin at 0 again",
     {"positions = keys[self.length :]": "positions = torch.arange(T)"}, POSITIONS),
    ("a token does not see its own key", {"keys <= positions": "keys < positions"}, POSITIONS),
    ("True where a key is hidden", {"keys <= positions": "keys > positions"}, POSITIONS),
    ("see counts the tokens that it was asked about",
     {"keys = torch.arange(self.length + T)":
      "start = getattr(self, 'seen', 0)\n        self.seen = start + T\n"
      "        keys = torch.arange(start + T)",
      "keys[self.length :]": "keys[start:]"}, POSITIONS),
    ("the tokens of a piece all see one another",
     {MASK: "return positions, torch.ones(T, self.length + T, dtype=torch.bool)"}, POSITIONS),
    ("positions are counted one too far",
     {"positions = keys[self.length :]": "positions = keys[self.length :] + 1"}, POSITIONS),
    ("the mask has columns for the new keys alone",
     {MASK: "return positions, positions <= positions[:, None]"}, POSITIONS),
    ("only the new pairs come back",
     {RETURN: "self.held[layer] = [keys, values]\n        return new[0], new[1]"}, KEYS),
    ("only the last piece is kept",
     {RETURN: "self.held[layer] = [x.clone() for x in new]\n        return keys, values"}, KEYS),
    ("new pairs are before the old ones",
     {"[old[:, :, :held], x]": "[x, old[:, :, :held]]"}, KEYS),
    ("put together along the heads, not the tokens",
     {"torch.cat([old[:, :, :held], x], 2)":
      "torch.cat([old, x], 1) if held and old.shape[2] == x.shape[2] else x"}, KEYS),
    ("keys and values are swapped",
     {RETURN: "self.held[layer] = [keys, values]\n        return values, keys"}, KEYS),
    ("all layers share one pair",
     {RESET: "self.held = [[]] * self.n_layer",
      RETURN: "self.held = [[keys, values]] * self.n_layer\n        return keys, values",
      WHOLE: "old[:, :, : held if layer or not held else None]"}, LAYERS),
    ("length is read from the first layer",
     {"self.held[-1][0].shape[2]": "self.held[0][0].shape[2]",
      "if self.held[-1]": "if self.held[0]"}, LAYERS),
    ("length counts the tokens of the first layer, before the pass is done",
     {"return self.held[-1][0].shape[2] if self.held[-1]":
      "return self.held[0][0].shape[2] if self.held[0]",
      "held = self.length ": "held = self.held[-1][0].shape[2] if self.held[-1] else 0 "}, LAYERS),
    ("tokens of a pass that stopped are kept", {WHOLE: KEPT}, HALF_WAY),
    ("see counts what the first layer holds",
     {"torch.arange(self.length + T)":
      "torch.arange((self.held[0][0].shape[2] if self.held[0] else 0) + T)",
      "keys[self.length :]": "keys[len(keys) - T :]"}, HALF_WAY),
    ("crop trusts the first layer, where a pass that stopped has left more",
     {CROP: "[[x[:, :, : length + self.held[0][0].shape[2] - pair[0].shape[2]] for x in pair] "
      "for pair in self.held]"}, HALF_WAY),
    ("only the last 2048 tokens are kept",
     {RETURN: "self.held[layer] = [keys[:, :, -2048:], values[:, :, -2048:]]\n"
      "        return keys[:, :, -2048:], values[:, :, -2048:]"}, "2057 tokens"),
    ("rows are selected in the keys, not in the values",
     {SELECT: "[[pair[0][rows], pair[1][: len(rows)]] for pair in self.held]"}, ROWS),
    ("rows are selected in the last layer alone",
     {SELECT: "[[x[: len(rows)] if pair is not self.held[-1] else x[rows] for x in pair] "
      "for pair in self.held]"}, ROWS),
    ("crop takes that many tokens away, instead of keeping them",
     {CROP: "[[x[:, :, :-length] for x in pair] for pair in self.held]"}, CROPPED),
    ("crop keeps the newest tokens",
     {CROP: "[[x[:, :, x.shape[2] - length :] for x in pair] for pair in self.held]"}, CROPPED),
    ("crop cuts the keys, not the values",
     {CROP: "[[pair[0][:, :, :length], pair[1]] for pair in self.held]", WHOLE: KEPT}, CROPPED),
    ("reset keeps rows and dtype of the old text",
     {RESET:
      "self.held = [[x[:, :, :0] for x in p] for p in getattr(self, 'held', [[]] * self.n_layer)]"},
     "reset, and another text"),
    ("layer -1 is taken for the last one", {RANGE: "if layer >= self.n_layer:"}, REFUSED),
    ("another dtype is converted without a word",
     {CHECK: "if any(len(old) != len(x) for old, x in pairs):"}, REFUSED),
    ("the keys are kept before the values are looked at",
     {CHECK: "if self.held[layer] and len(pairs[0][0]) == len(k) "
      "and pairs[0][0].dtype == k.dtype:\n"
      "            self.held[layer][0] = torch.cat([pairs[0][0], new[0]], 2)\n"
      f"        {CHECK}", WHOLE: KEPT}, REFUSED),
    ("rows and dtype are looked at in the first layer alone",
     {CHECK: CHECK.replace("if any(", "if layer == 0 and any(")}, REFUSED),
    ("a refusal throws away what earlier layers of the pass have got",
     {CHECK: f"{CHECK}\n            self.crop(self.length)"}, REFUSED),
    ("the first piece is kept as it is, without a copy",
     {RETURN: "self.held[layer] = [keys, values] if self.held[layer] else new\n"
      "        return keys, values"}, MEMORY),
    ("all caches share what they hold",
     {RESET: "GrowingPairs.held = [[] for _ in range(self.n_layer)]"}, MEMORY),
    ("each cache has its own length, but all keep one store", OneStore, MEMORY),
    ("the graph of every pass is kept", {NEW: "new = [k, v]"}, "no graph is kept"),
]  # fmt: skip

CASES = (
    Case(KEYS, one_layer,
         "update returns the old pairs and then the new ones, along the token axis, 2", points=2,
         use=pieces, teaching="one layer and the plain law, the first thing to read"),
    Case(POSITIONS, one_layer,
         "the new tokens are the last T of S = length + T; row t sees S - T + t + 1 keys", points=3,
         use=sight, teaching="what the new tokens may see, before anything goes wrong"),
    Case(LAYERS, lambda g: call(n_layer=2, layers=text(g, 2), sizes=[4, 1, 3]),
         "every layer has its own pairs; a token counts when the last layer has got it", points=2,
         use=whole_passes, teaching="it shows in which layer, and at which point of the pass"),
    Case(ROWS, chosen_rows,
         "rows of keys and of values, in every layer; the number of rows may change", use=selected,
         teaching="rows alone, after whole passes"),
    Case(CROPPED, two_texts, "crop(2) keeps positions 0 and 1 of keys and values, in every layer",
         use=cropped, teaching="crop alone, after whole passes"),
    Case("reset, and another text", another_batch,
         "after reset() a text with other rows and another dtype may come", use=forgotten),
    Case(HALF_WAY, lambda g: call(n_layer=3, layers=text(g, 3), junk=text(g, 2, n=3)),
         "length did not count the lost tokens, so each layer goes on at length", use=broken_off),
    Case("2057 tokens", lambda g: call(n_layer=1, layers=text(g, 1, n=2057)),
         "the text says of no limit: every token is kept", use=long_text),
    Case(REFUSED, two_plain,
         "look at everything before you change anything; -1 is no layer", use=refused),
    Case(MEMORY, two_plain,
         "keep copies, and make them in __init__ or later, not in the class", use=own_memory),
    Case("no graph is kept", two_plain,
         "detach what you keep: a graph would hold every pass in memory", use=without_graph),
)  # fmt: skip

EXERCISE = Exercise(
    name="growing_cache", function="GrowingPairs", page="5_caching/1_why_cache", minutes=35,
    difficulty=2,
    outcome="Write a key-value cache so that passes over the pieces of a text give what one pass "
            "over all of it gives.",
    after=("visibility",), reference=Reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Keep a pair of tensors for each layer, and nothing else: the length, the positions and "
        "the mask follow from their sizes. Which layer's size counts whole passes?",
        "`keys = torch.arange(length + T)` are the positions of all keys; those of the new tokens "
        "are its last T. A key is visible if its position is not above that of the query.",
        "In update, refuse before anything changes. A layer may hold more than `length` tokens, "
        "of a pass that stopped: these are not part of the text.",
    ),
)  # fmt: skip
