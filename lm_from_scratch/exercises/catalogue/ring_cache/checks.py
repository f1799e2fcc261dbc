"""A ring of W slots: which slot, when it is written, and what a long piece leaves in it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.attention.attention import attention_weights
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.slots import SlidingCache
from lm_from_scratch.exercises.exercise import Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal

Text = tuple[Tensor, Tensor, Tensor]  # queries, keys and values of all tokens
Make = Callable[..., Any]  # what the student writes


class Reference:
    """The package's cache with the methods of this exercise."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.reset()

    def reset(self) -> None:
        self.cache = SlidingCache(1, self.window)

    @property
    def length(self) -> int:
        return self.cache.length

    @property
    def positions(self) -> Tensor:
        positions = self.cache.tracks[0].positions
        assert positions is not None
        return positions[0, : self.window]

    @property
    def keys(self) -> Tensor:
        return self.cache.keys[0].read(slice(0, self.window))

    @property
    def values(self) -> Tensor:
        return self.cache.values[0].read(slice(0, self.window))

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (seen,) = self.cache.see(k[:, 0, :, 0], windows=[self.window])
        return *self.cache[0].update(k, v), seen.key_positions[0]


# -------------------------------------------------------------------------------- how it is used


def feed(ring: Any, text: Text, start: int, end: int, window: int) -> Any:
    """What the tokens from start to end - 1 find, and what attention makes of it."""
    q, k, v = (part[:, :, start:end] for part in text)
    result = ring.update(k, v)
    if not isinstance(result, (tuple, list)) or len(result) != 3:
        return result
    keys, values, positions = result
    if not all(isinstance(part, Tensor) for part in result):
        return result
    sizes = [*keys.shape[2:3], *values.shape[2:3], positions.numel()]
    if positions.dim() != 1 or len(set(sizes)) > 1:
        return f"keys, values and positions of {', '.join(map(str, sizes))} tokens"
    results: dict[str, Any] = {}
    for p in range(start, end):
        seen = positions[(positions >= 0) & (positions <= p) & (positions > p - window)]
        results[f"positions that token {p} sees"] = seen.sort().values.tolist()
    results["at most W + T keys come back"] = len(positions) <= window + end - start
    place = f"token {start}" if end == start + 1 else f"tokens {start} to {end - 1}"
    results[f"the attention of {place}"] = "a token sees nothing"
    if all(results[f"positions that token {p} sees"] for p in range(start, end)):
        rule = Visibility(torch.arange(start, end)[None], positions[None], window=window)
        results[f"the attention of {place}"] = attention_weights(q, keys, rule) @ values
    return results


def pieces(make: Make, window: int, text: Text, sizes: Sequence[int]) -> Any:
    ring, at = make(window), 0
    results: dict[str, Any] = {"length at first": ring.length}
    for size in sizes:
        results[f"update, {size} tokens after {at}"] = feed(ring, text, at, at + size, window)
        at += size
        results[f"length after {at} tokens"] = ring.length
    return results


def slots(make: Make, window: int, text: Text, sizes: Sequence[int]) -> Any:
    ring, at = make(window), 0
    results: dict[str, Any] = {}
    for size in sizes:
        ring.update(*(part[:, :, at : at + size] for part in text[1:]))
        at += size
        results[f"the slots' positions after {at} tokens"] = ring.positions.clone()
        held = (ring.positions >= 0)[:, None]
        for name, buffer in (("keys", ring.keys), ("values", ring.values)):
            if buffer.shape[2] == window:
                buffer = torch.where(held, buffer, 0.0)  # what never was written may be anything
            results[f"the slots' {name} after {at} tokens"] = buffer
    return results


def long_text(make: Make, window: int, text: Text) -> Any:
    ring, end = make(window), text[0].shape[2]
    last = [part[:, :, end - 1 :] for part in text[1:]]
    ring.update(*(part[:, :, : end - 2] for part in text[1:]))
    return {
        "the slots' positions after a long piece": ring.positions.clone(),
        "the next update": feed(ring, text, end - 2, end - 1, window),
        "the newest position of the update after it": int(ring.update(*last)[2].max()),
        "the slots' positions at the end": ring.positions.clone(),
    }


def again(make: Make, window: int, text: Text, other: Text) -> Any:
    ring = make(window)
    ring.update(*(part[:, :, :5] for part in other[1:]))
    ring.reset()
    return {
        "length after reset()": ring.length,
        "update after reset()": feed(ring, text, 0, 2, window),
        "the next update": feed(ring, text, 2, 4, window),
    }


def own_memory(make: Make, window: int, text: Text, other: Text) -> Any:
    ring, second = make(window), make(window)
    q, k, v = (part.clone() for part in text)
    results = {"the first update": feed(ring, (q, k, v), 0, window, window)}
    results["an update of another ring"] = feed(second, other, 0, 2, window)
    k.zero_(), v.zero_()  # the caller's buffers are used again
    results["the next update, k and v overwritten"] = feed(ring, text, window, window + 1, window)
    results["the next update of the other ring"] = feed(second, other, 2, 3, window)
    return results


# ------------------------------------------------------------------------------------- arguments


def text(g: Generator, n: int, B: int = 2, H: int = 3, dtype: torch.dtype = torch.float32) -> Text:
    D, E = 4, 5
    return tuple(normal(g, B, H, n, size, dtype=dtype) for size in (D, D, E))  # type: ignore


# ------------------------------------------------------------------------------- wrong answers

JOINED = "torch.cat([self.positions, new])"
READ = """keys = torch.cat([self.keys, k], dim=2)
        values = torch.cat([self.values, v], dim=2)
        positions = torch.cat([self.positions, new])
"""
RETURN = "return keys, values, positions"
SLOTS = "slots = new[last] % self.window"
LAST = "last = slice(-self.window, None)"
TABLE = "self.positions[slots] = new[last]"
COUNT = "self.length += len(new)"
RESET = "self.length = 0\n        self.positions = torch.full((self.window,), -1)"
RING = "return self.keys, self.values, self.positions"

FULL, TOKEN = "pieces after the ring is full, W = 4", "token by token, W = 3"
IN_PLACE, LONGER = "the slots themselves, W = 4", "pieces longer than the window, W = 3"
LONG, AGAIN, MEMORY = "33000 tokens, W = 1", "reset, and another text", "its own memory"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("written before it is read: the new tokens push out what they still see",
     {RETURN: RING}, FULL),
    ("written before it is read, and the new keys are there twice",
     {READ: "", RETURN: "return (torch.cat([self.keys, k], 2), torch.cat([self.values, v], "
      "2), torch.cat([self.positions, new]))"}, TOKEN),
    ("the slots of each piece are counted from 0",
     {SLOTS: "slots = torch.arange(len(new[last])) % self.window"}, IN_PLACE),
    ("a ring of W - 1 slots", {SLOTS: "slots = new[last] % max(self.window - 1, 1)"}, IN_PLACE),
    ("a ring of W + 1 slots", {"self.window = window": "self.window = window + 1"}, IN_PLACE),
    ("slots are counted from 1", {SLOTS: "slots = (new[last] + 1) % self.window"}, IN_PLACE),
    ("of a long piece the first W tokens are kept, not the last",
     {LAST: "last = slice(self.window)"}, LONGER),
    ("of a long piece the first tokens do not see their own keys",
     {"torch.cat([self.keys, k]": "torch.cat([self.keys, k[:, :, -self.window :]]",
      "torch.cat([self.values, v]": "torch.cat([self.values, v[:, :, -self.window :]]",
      JOINED: "torch.cat([self.positions, new[-self.window :]])"}, LONGER),
    ("the positions of a new piece start at 0",
     {JOINED: "torch.cat([self.positions, new - self.length])"}, TOKEN),
    ("the number of a slot is taken for the position in it",
     {TABLE: "self.positions[slots] = slots"}, TOKEN),
    ("the slots are taken to be in order of time",
     {JOINED:
          "torch.cat([torch.arange(self.length - self.window, self.length).clamp(min=-1), new])"},
     TOKEN),
    ("the new tokens do not see one another, nor themselves",
     {RETURN:
      "return keys[:, :, : self.window], values[:, :, : self.window], positions[: self.window]"},
     TOKEN),
    ("the old keys are dropped when several tokens come",
     {RETURN: "return (keys, values, positions) if len(new) == 1 else (k, v, new)"}, FULL),
    ("the window in order of time, oldest first: not a ring",
     {"        self.keys[:, :, slots] = k[:, :, last]\n"
      "        self.values[:, :, slots] = v[:, :, last]\n"
      f"        {TABLE}\n":
          "        self.keys, self.values = keys[:, :, last], "
          "values[:, :, last]\n        self.positions = positions[last]\n"},
     IN_PLACE),
    ("W - 1 of the slots come back, as with [-W + 1:]",
     {"torch.cat([self.keys, k]": "torch.cat([self.keys[:, :, 1 - self.window :], k]",
      "torch.cat([self.values, v]": "torch.cat([self.values[:, :, 1 - self.window :], v]",
      JOINED: "torch.cat([self.positions[1 - self.window :], new])"}, TOKEN),
    ("length counts updates, not tokens",
     {COUNT: "self.length += 1"}, "a prompt, then token by token, W = 5"),
    ("slots that hold nothing look like position 0",
     {"torch.full((self.window,), -1)": "torch.zeros(self.window, dtype=torch.long)"}, TOKEN),
    ("values go one slot further than keys",
     {"self.values[:, :, slots]": "self.values[:, :, (slots + 1) % self.window]"}, TOKEN),
    ("nothing is ever pushed out",
     {LAST: "last = slice(None)",
      SLOTS: "",
      "        self.keys[:, :, slots] = k[:, :, last]\n"
      "        self.values[:, :, slots] = v[:, :, last]\n"
      f"        {TABLE}\n":
          "        self.keys, self.values, self.positions = keys, values, positions\n"},
     IN_PLACE),
    ("positions are kept in 16 bits",
     {TABLE: "self.positions[slots] = new[last].short().long()"}, LONG),
    ("positions start at 0 again after 2048 tokens",
     {TABLE: "self.positions[slots] = new[last] % 2048",
      JOINED: "torch.cat([self.positions, new % 2048])"}, LONG),
    ("reset leaves the old positions in the slots",
     {RESET: "self.length = 0\n        if not hasattr(self, 'positions'):\n            "
      "self.positions = torch.full((self.window,), -1)"}, AGAIN),
    ("the buffers are float32, whatever comes",
     {"k.new_zeros(": "torch.zeros(", "v.new_zeros(": "torch.zeros("}, AGAIN),
    ("the first piece is the ring, without a copy",
     {COUNT: f"if self.length == 0 and len(new) == self.window:\n            "
      f"self.keys, self.values = k, v\n        {COUNT}"}, MEMORY),
    ("all rings share one table of positions",
     {"self.positions = torch.full((self.window,), -1)": "tables = vars(RingPairs.update)"
      "\n        new = torch.full((self.window,), -1)\n"
      "        self.positions = tables.setdefault(self.window, new).fill_(-1)"}, MEMORY),
]  # fmt: skip

CASES = (
    Case(TOKEN, lambda g: call(window=3, text=text(g, 8), sizes=[1] * 8),
         "token 3 goes where token 0 was: slot 3 % 3 = 0", points=2, use=pieces,
         teaching="the wrap in its plain form"),
    Case(IN_PLACE, lambda g: call(window=4, text=text(g, 12), sizes=[1, 4, 1, 4, 2]),
         "position p is in slot p % W, whatever the pieces were; -1 where nothing was written",
         points=2, use=slots),
    Case("a prompt, then token by token, W = 5",
         lambda g: call(window=5, text=text(g, 9), sizes=[4, 1, 1, 1, 1]),
         "length grows by T, and slots that hold nothing must stay hidden", use=pieces,
         teaching="the common use: prefill, then decode"),
    Case(FULL, lambda g: call(window=4, text=text(g, 13), sizes=[4, 3, 1, 2, 3]),
         "the first of several new tokens still sees what the last one pushes out: read the slots "
         "before you write", points=3, use=pieces,
         teaching="the order of reading and writing, in pieces that fit into the ring"),
    Case(LONGER, lambda g: call(window=3, text=text(g, 16), sizes=[8, 1, 5, 2]),
         "only the last W tokens of a long piece are kept", points=2, use=pieces),
    Case(LONG, lambda g: call(window=1, text=text(g, 33_000, B=1, H=1)),
         "a text may be of any length: positions are int64 and never start again; one slot is a "
         "ring, too", use=long_text),
    Case(AGAIN,
         lambda g: call(window=4, text=text(g, 9, B=1, H=2, dtype=torch.float64), other=text(g, 9)),
         "after reset() nothing is held, and the buffers are made for the new text", use=again),
    Case(MEMORY, lambda g: call(window=4, text=text(g, 9), other=text(g, 9)),
         "the ring copies what it keeps, and two rings have buffers of their own", use=own_memory),
)  # fmt: skip

EXERCISE = Exercise(
    name="ring_cache", function="RingPairs", page="5_caching/2_kinds_of_cache", minutes=35,
    difficulty=3,
    outcome="Write the cache of a sliding window as a ring of W slots, so that pieces of any "
            "length find the keys of their windows.",
    after=("visibility", "growing_cache"), reference=Reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Draw W = 4 slots and feed tokens 0 to 5 one by one, then 6, 7, 8 at once. Which keys does "
        "token 6 need, and where are they after token 8 was written?",
        "Keep a table of positions beside the slots, -1 at first. What you return are the slots as "
        "they were, and the new tokens beside them: keys, values and positions joined alike.",
        "Join first, then write. A piece longer than W has several tokens for one slot: write only "
        "those that stay. An index of slots puts them all there at once, also round the end.",
    ),
)  # fmt: skip
