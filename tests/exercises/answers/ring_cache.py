"""Answers to ring_cache: other right ones, and wrong ones of a second person."""

from typing import Any

import torch

from lm_from_scratch.exercises.catalogue.ring_cache.checks import Reference


class ByToken:
    """Token by token: a slot is replaced when its new owner comes."""

    def __init__(self, window):
        self.window = window
        self.reset()

    def reset(self):
        self.length = 0
        self.ring: dict[int, Any] = {}

    def update(self, k, v):
        seen = list(self.ring.values())
        for pair in zip(k.clone().unbind(2), v.clone().unbind(2), strict=True):
            entry = *pair, self.length
            self.ring[self.length % self.window] = entry
            seen.append(entry)
            self.length += 1
        some = [self.ring.get(s, (0 * k[:, :, 0], 0 * v[:, :, 0], -1)) for s in range(self.window)]
        self.keys, self.values = (torch.stack([e[i] for e in some], 2) for i in (0, 1))
        self.positions = torch.tensor([entry[2] for entry in some])
        keys, values = (torch.stack([entry[i] for entry in seen], 2) for i in (0, 1))
        return keys, values, torch.tensor([entry[2] for entry in seen])


class InOrder:
    """The last W tokens in order of time; the ring is that, rolled."""

    def __init__(self, window):
        self.window = window
        self.reset()

    def reset(self):
        self.length = 0
        self.held: Any = None

    def update(self, k, v):
        W = self.window
        new = torch.arange(self.length, self.length + k.shape[2])[None, None, :, None]
        if self.held is None:
            empty = [x.new_zeros(*x.shape[:2], W, x.shape[3]) for x in (k, v)]
            self.held = [*empty, torch.full((1, 1, W, 1), -1)]
        both = [torch.cat(pair, 2) for pair in zip(self.held, (k, v, new), strict=True)]
        self.held = [x[:, :, -W:].clone() for x in both]
        self.length += k.shape[2]
        self.keys, self.values, table = (x.roll(self.length, 2) for x in self.held)
        self.positions = table.flatten()
        return both[0], both[1], both[2].flatten()


class Narrow(Reference):
    """Returns no key that none of the new tokens sees, newest first."""

    def update(self, k, v):
        oldest = self.length - self.window
        keys, values, positions = super().update(k, v)
        order = positions.argsort(descending=True)
        order = order[positions[order] > max(oldest, -1)]
        return keys[:, :, order], values[:, :, order], positions[order]


class WithBin:
    """Written by scatter, with one more slot for what need not be kept."""

    def __init__(self, window):
        self.window = window
        self.reset()

    def reset(self):
        self.length = 0
        self.buffers: Any = None

    def update(self, k, v):
        W, T = self.window, k.shape[2]
        new = torch.arange(self.length, self.length + T).reshape(1, 1, T, 1)
        if self.buffers is None:
            self.buffers = [x.new_full((*x.shape[:2], W + 1, x.shape[3]), -1) for x in (k, v, new)]
        self.length += T
        where = torch.where(new < self.length - W, W, new % W)
        parts = [
            torch.cat([b[:, :, :-1], x], 2) for b, x in zip(self.buffers, (k, v, new), strict=True)
        ]
        self.buffers = [
            b.scatter(2, where.expand_as(x), x)
            for b, x in zip(self.buffers, (k, v, new), strict=True)
        ]
        self.keys, self.values, table = (b[:, :, :-1] for b in self.buffers)
        self.positions = table.flatten()
        return parts[0], parts[1], parts[2].flatten()


RIGHT = [
    ByToken, InOrder, Narrow, WithBin,
    # a single token gets the ring itself
    {"return keys, values, positions":
     "own = self.keys, self.values, self.positions\n"
     "        return own if k.shape[2] == 1 else (keys, values, positions)"},
]  # fmt: skip

COUNTED, EMPTY = "self.length += len(new)", "self.length = 0\n"
RESULT = "return keys, values, positions"

WRONG = [
    ("a long piece is written from slot 0 on",
     {"slots = new[last] % self.window": "slots = new[last] % self.window\n"
      "        slots = torch.arange(self.window) if len(new) >= self.window else slots"}),
    ("reset keeps the length",
     {EMPTY: 'self.length = getattr(self, "length", 0)\n',
      "if self.length == 0": "if self.positions.max() < 0"}),
    ("values as wide as keys",
     {"v.new_zeros(*v.shape[:2], self.window, v.shape[3])": "torch.zeros_like(self.keys)"}),
    ("the first piece is the ring, without a copy",
     {COUNTED: f"{COUNTED}\n        if len(new) == self.window and not self.length % self.window:\n"
      "            self.keys, self.values = k, v"}),
    ("the length ends at the window",
     {COUNTED: "self.length = min(self.length + len(new), self.window)"}),
    ("length is a tensor", {EMPTY: "self.length = torch.tensor(0)\n"}),
    ("positions in int32",
     {"torch.full((self.window,), -1)": "torch.full((self.window,), -1, dtype=torch.int32)",
      RESULT: f"{RESULT}.int()"}),
    ("it grows for ever",
     {RESULT: "if self.length > len(new):\n"
      "            k, v = torch.cat([self.all[0], k], 2), torch.cat([self.all[1], v], 2)\n"
      "        self.all = k.clone(), v.clone()\n"
      "        return *self.all, torch.arange(self.length)"}),
]  # fmt: skip
