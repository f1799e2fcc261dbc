"""Answers to ring_cache that were written from its text alone."""

import torch


class RightAllPlusNew:
    def __init__(self, window):
        self.window = window
        self.reset()

    def reset(self):
        self.length = 0
        self.keys = self.values = None
        self.positions = torch.full((self.window,), -1)

    def make(self, k, v):
        W = self.window
        if self.keys is None:
            self.keys = k.new_zeros(*k.shape[:2], W, k.shape[3])
            self.values = v.new_zeros(*v.shape[:2], W, v.shape[3])

    def update(self, k, v):
        self.make(k, v)
        k, v = k.clone(), v.clone()
        T = k.shape[2]
        new = torch.arange(self.length, self.length + T)
        out = (
            torch.cat([self.keys, k], 2),
            torch.cat([self.values, v], 2),
            torch.cat([self.positions, new]),
        )
        self.store(k, v, new)
        self.length += T
        return out

    def store(self, k, v, new):
        last = slice(max(0, len(new) - self.window), None)
        slots = new[last] % self.window
        self.keys[:, :, slots] = k[:, :, last]
        self.values[:, :, slots] = v[:, :, last]
        self.positions[slots] = new[last]


class RightTokenByToken(RightAllPlusNew):
    def store(self, k, v, new):
        for t, p in enumerate(new.tolist()):
            self.keys[:, :, p % self.window] = k[:, :, t]
            self.values[:, :, p % self.window] = v[:, :, t]
            self.positions[p % self.window] = p


class RingItselfReturned(RightAllPlusNew):
    def update(self, k, v):
        super().update(k, v)
        return self.keys.clone(), self.values.clone(), self.positions.clone()


class OldAndNewAfterWriting(RightAllPlusNew):
    def update(self, k, v):
        self.make(k, v)
        new = torch.arange(self.length, self.length + k.shape[2])
        self.store(k, v, new)
        self.length += k.shape[2]
        return (
            torch.cat([self.keys, k], 2),
            torch.cat([self.values, v], 2),
            torch.cat([self.positions, new]),
        )


class FirstTokensOfALongPiece(RightAllPlusNew):
    def store(self, k, v, new):
        W = self.window
        slots = new[:W] % W
        self.keys[:, :, slots] = k[:, :, :W]
        self.values[:, :, slots] = v[:, :, :W]
        self.positions[slots] = new[:W]


class LongPieceFromSlotZero(RightAllPlusNew):
    def store(self, k, v, new):
        if len(new) >= self.window:
            self.keys = k[:, :, -self.window :].clone()
            self.values = v[:, :, -self.window :].clone()
            self.positions = new[-self.window :].clone()
        else:
            super().store(k, v, new)


class ShiftedNotRing(RightAllPlusNew):
    def store(self, k, v, new):
        W = self.window
        self.keys = torch.cat([self.keys, k], 2)[:, :, -W:]
        self.values = torch.cat([self.values, v], 2)[:, :, -W:]
        self.positions = torch.cat([self.positions, new])[-W:]


class EmptySlotsAtPositionZero(RightAllPlusNew):
    def reset(self):
        super().reset()
        self.positions = torch.zeros(self.window, dtype=torch.long)


class PositionsNotReset(RightAllPlusNew):
    def reset(self):
        old = getattr(self, "positions", None)
        super().reset()
        if old is not None:
            self.positions = old


class LengthNotReset(RightAllPlusNew):
    def reset(self):
        old = getattr(self, "length", 0)
        super().reset()
        self.length = old


class SlotsCountedFromOne(RightAllPlusNew):
    def store(self, k, v, new):
        last = slice(max(0, len(new) - self.window), None)
        slots = (new[last] + 1) % self.window
        self.keys[:, :, slots] = k[:, :, last]
        self.values[:, :, slots] = v[:, :, last]
        self.positions[slots] = new[last]


class OneSlotTooMany(RightAllPlusNew):
    def __init__(self, window):
        super().__init__(window + 1)


class Float32Ring(RightAllPlusNew):
    def make(self, k, v):
        if self.keys is None:
            self.keys = torch.zeros(*k.shape[:2], self.window, k.shape[3])
            self.values = torch.zeros(*v.shape[:2], self.window, v.shape[3])


class ValuesAsWideAsKeys(RightAllPlusNew):
    def make(self, k, v):
        if self.keys is None:
            self.keys = k.new_zeros(*k.shape[:2], self.window, k.shape[3])
            self.values = torch.zeros_like(self.keys)


class AliasOfThePiece(RightAllPlusNew):
    def store(self, k, v, new):
        super().store(k, v, new)

    def update(self, k, v):
        out = super().update(k, v)
        if k.shape[2] == self.window and self.length % self.window == 0:
            self.keys, self.values = k, v
        return out


class LengthCappedAtTheWindow(RightAllPlusNew):
    def update(self, k, v):
        out = super().update(k, v)
        self.length = min(self.length, self.window)
        return out


class LengthAsTensor(RightAllPlusNew):
    def reset(self):
        super().reset()
        self.length = torch.tensor(0)


class RingReturnedForSingleTokensAsView(RightAllPlusNew):
    def update(self, k, v):
        out = super().update(k, v)
        if k.shape[2] == 1:
            return self.keys, self.values, self.positions
        return out


class OldKeysOfTheWindowForgottenInAPiece(RightAllPlusNew):
    def update(self, k, v):
        out = super().update(k, v)
        keep = slice(-max(k.shape[2], self.window), None)
        return out[0][:, :, keep], out[1][:, :, keep], out[2][keep]


class PositionsInt32(RightAllPlusNew):
    def reset(self):
        super().reset()
        self.positions = self.positions.int()

    def update(self, k, v):
        keys, values, positions = super().update(k, v)
        return keys, values, positions.int()


class GrowsForEver(RightAllPlusNew):
    def update(self, k, v):
        out = super().update(k, v)
        pairs = getattr(self, "all", None)
        if pairs is not None and self.length > k.shape[2]:
            new = torch.arange(self.length)
            out = torch.cat([pairs[0], k], 2), torch.cat([pairs[1], v], 2), new
        else:
            out = k.clone(), v.clone(), torch.arange(k.shape[2])
        self.all = out
        return out


class SharedPositions(RightAllPlusNew):
    shared: dict = {}  # noqa: RUF012

    def reset(self):
        super().reset()
        self.positions = self.shared.setdefault(self.window, self.positions)
        self.positions.fill_(-1)


ANSWERS = {
    RingItselfReturned: "written before it is read: the new tokens push out what they still see",
    OldAndNewAfterWriting: "written before it is read, and the new keys are there twice",
    FirstTokensOfALongPiece: "of a long piece the first W tokens are kept, not the last",
    LongPieceFromSlotZero: "",
    ShiftedNotRing: "the window in order of time, oldest first: not a ring",
    EmptySlotsAtPositionZero: "slots that hold nothing look like position 0",
    PositionsNotReset: "reset leaves the old positions in the slots",
    LengthNotReset: "",
    SlotsCountedFromOne: "slots are counted from 1",
    OneSlotTooMany: "a ring of W + 1 slots",
    Float32Ring: "",
    ValuesAsWideAsKeys: "",
    AliasOfThePiece: "the first piece is the ring, without a copy",
    LengthCappedAtTheWindow: "",
    LengthAsTensor: "",
    OldKeysOfTheWindowForgottenInAPiece: "W - 1 of the slots come back, as with [-W + 1:]",
    PositionsInt32: "",
    GrowsForEver: "",
    SharedPositions: "all rings share one table of positions",
}
RIGHT = [RightAllPlusNew, RightTokenByToken, RingReturnedForSingleTokensAsView]
