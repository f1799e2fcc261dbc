"""Answers to the exercise hunt_rotary_table, written from its text alone."""

import torch
from torch import nn


def frequencies(dim, theta):
    return theta ** -(torch.arange(0, dim, 2).float() / dim)


class Base(nn.Module):
    def __init__(self, dim, theta=10000.0):
        super().__init__()
        self.dim, self.theta = dim, theta
        self.setup()

    def setup(self):
        pass

    def angles(self, positions):
        return positions.unsqueeze(1).unsqueeze(-1).float() * frequencies(self.dim, self.theta)

    def forward(self, x, positions, key_length):
        a = self.angles(positions)
        return a.cos().to(x), a.sin().to(x)


class RightOuter(Base):
    def forward(self, x, positions, key_length):
        freq = frequencies(self.dim, self.theta)
        a = torch.stack([torch.outer(row.float(), freq) for row in positions])[:, None]
        return torch.cos(a).type(x.dtype), torch.sin(a).type(x.dtype)


class RightTableOfPairs(Base):
    """A float32 table outside the buffers, made longer where a position asks for it."""

    def setup(self):
        self.rows = self.table(8)

    def table(self, n):
        return torch.arange(n)[:, None] * frequencies(self.dim, self.theta)

    def forward(self, x, positions, key_length):
        longest = int(positions.max()) + 1
        if longest > len(self.rows):
            self.rows = self.table(longest)
        a = self.rows[positions].unsqueeze(1)
        return a.cos().to(x.dtype), a.sin().to(x.dtype)


class StillLimitedByKeys(Base):
    def setup(self):
        self.keys = 0

    def forward(self, x, positions, key_length):
        a = torch.outer(torch.arange(key_length).float(), frequencies(self.dim, self.theta))
        return a.cos()[positions][:, None].to(x.dtype), a.sin()[positions][:, None].to(x.dtype)


class AnglesInDtypeOfX(Base):
    def forward(self, x, positions, key_length):
        freq = frequencies(self.dim, self.theta).to(x.dtype)
        a = positions.to(x.dtype)[:, None, :, None] * freq
        return a.cos(), a.sin()


class OnlyPositionsRounded(Base):
    def angles(self, positions):
        return super().angles(positions.to(self.kind))

    def forward(self, x, positions, key_length):
        self.kind = x.dtype
        return super().forward(x, positions, key_length)


class SpeedsInABuffer(Base):
    def setup(self):
        self.register_buffer("freq", frequencies(self.dim, self.theta), persistent=False)

    def angles(self, positions):
        return positions[:, None, :, None].float() * self.freq.float()


class SpeedsInTheStateDict(Base):
    def setup(self):
        self.register_buffer("freq", frequencies(self.dim, self.theta))

    def angles(self, positions):
        return positions[:, None, :, None] * frequencies(self.dim, self.theta)


class SpeedsAsParameter(Base):
    def setup(self):
        self.freq = nn.Parameter(frequencies(self.dim, self.theta), requires_grad=False)


class FloatTableRoundedByTo(Base):
    def setup(self):
        self.grow(32)

    def grow(self, n):
        a = torch.arange(n)[:, None] * frequencies(self.dim, self.theta)
        self.register_buffer("c", a.cos(), persistent=False)
        self.register_buffer("s", a.sin(), persistent=False)

    def forward(self, x, positions, key_length):
        need = max(key_length, int(positions.max()) + 1)
        if need > len(self.c):
            self.grow(need)
        return self.c[positions][:, None].to(x.dtype), self.s[positions][:, None].to(x.dtype)


class TableKeepsDtypeOfFirstLongCall(Base):
    def setup(self):
        self.c = self.s = torch.empty(0, self.dim // 2)

    def forward(self, x, positions, key_length):
        need = int(positions.max()) + 1
        if need > len(self.c):
            a = torch.arange(need)[:, None] * frequencies(self.dim, self.theta)
            self.c, self.s = a.cos().to(x.dtype), a.sin().to(x.dtype)
        return self.c[positions][:, None].to(x.dtype), self.s[positions][:, None].to(x.dtype)


class LengthFromLastPosition(Base):
    def forward(self, x, positions, key_length):
        n = int(positions[0, -1]) + 1
        a = torch.arange(n)[:, None] * frequencies(self.dim, self.theta)
        return a.cos()[positions][:, None].to(x.dtype), a.sin()[positions][:, None].to(x.dtype)


class LengthFromFirstRow(Base):
    def forward(self, x, positions, key_length):
        n = max(int(positions[0].max()) + 1, key_length)
        a = torch.arange(n)[:, None] * frequencies(self.dim, self.theta)
        return a.cos()[positions][:, None].to(x.dtype), a.sin()[positions][:, None].to(x.dtype)


class TableOneTooShort(Base):
    def forward(self, x, positions, key_length):
        n = max(int(positions.max()), key_length)
        a = torch.arange(n)[:, None] * frequencies(self.dim, self.theta)
        return a.cos()[positions][:, None].to(x.dtype), a.sin()[positions][:, None].to(x.dtype)


class LargeTable(Base):
    def setup(self):
        a = torch.arange(32768)[:, None] * frequencies(self.dim, self.theta)
        self.c, self.s = a.cos(), a.sin()

    def forward(self, x, positions, key_length):
        return self.c[positions][:, None].to(x.dtype), self.s[positions][:, None].to(x.dtype)


class LimitedToKeys(Base):
    def angles(self, positions):
        return super().angles(positions.clamp(max=self.n - 1))

    def forward(self, x, positions, key_length):
        self.n = key_length
        return super().forward(x, positions, key_length)


class PositionsWrapAround(Base):
    def angles(self, positions):
        return super().angles(positions % self.n)

    def forward(self, x, positions, key_length):
        self.n = key_length
        return super().forward(x, positions, key_length)


class PositionsIgnored(Base):
    def angles(self, positions):
        return super().angles(torch.arange(positions.shape[1]).expand_as(positions))


class LastKeysOnly(Base):
    def forward(self, x, positions, key_length):
        t = torch.arange(key_length - positions.shape[1], key_length)
        return super().forward(x, t.expand_as(positions), key_length)


class SharedByAll(Base):
    tables: dict = {}  # noqa: RUF012

    def forward(self, x, positions, key_length):
        n = int(positions.max()) + 1
        key = (n, x.dtype)
        if key not in self.tables:
            a = torch.arange(n)[:, None] * frequencies(self.dim, self.theta)
            self.tables[key] = a.cos().to(x.dtype), a.sin().to(x.dtype)
        c, s = self.tables[key]
        return c[positions][:, None], s[positions][:, None]


class RemembersByShape(Base):
    def forward(self, x, positions, key_length):
        known = getattr(self, "known", None)
        if known is None or known[0].shape[2] != positions.shape[1]:
            self.known = known = super().forward(x.float(), positions, key_length)
        return known[0].to(x.dtype), known[1].to(x.dtype)


class NoHeadAxis(Base):
    def forward(self, x, positions, key_length):
        c, s = super().forward(x, positions, key_length)
        return c[:, 0], s[:, 0]


class StaysFloat32(Base):
    def forward(self, x, positions, key_length):
        return super().forward(x.float(), positions, key_length)


class FirstRowForAll(Base):
    def angles(self, positions):
        return super().angles(positions[:1].expand_as(positions))


class ThetaForgotten(Base):
    def __init__(self, dim, theta=10000.0):
        super().__init__(dim)


class FullWidth(Base):
    def angles(self, positions):
        half = super().angles(positions)
        return torch.cat((half, half), -1)


class SinesFirst(Base):
    def forward(self, x, positions, key_length):
        return super().forward(x, positions, key_length)[::-1]


class RoundedTwice(Base):
    def forward(self, x, positions, key_length):
        a = self.angles(positions).to(x.dtype)
        return a.cos(), a.sin()


ANSWERS = {
    StillLimitedByKeys: "half fixed: float32, but still cut to the number of keys",
    AnglesInDtypeOfX: "speeds and positions are in the dtype of x",
    OnlyPositionsRounded: "positions are counted in the dtype of x: 257 becomes 256",
    SpeedsInABuffer: "the speeds are a buffer: rounded by .to(bfloat16), and .float() "
    "brings nothing back",
    SpeedsInTheStateDict: "",
    SpeedsAsParameter: "the speeds are parameters",
    FloatTableRoundedByTo: "the table is a buffer, which .to(bfloat16) rounds",
    TableKeepsDtypeOfFirstLongCall: "the table is in the dtype of the call that made it longer",
    LengthFromLastPosition: "the last position of a row is taken for its largest",
    LengthFromFirstRow: "",
    TableOneTooShort: "one row too few: as many as the largest position",
    LargeTable: "a table of a fixed length, if a large one",
    LimitedToKeys: "positions outside of the table get its last row",
    PositionsWrapAround: "positions outside of the table begin again at 0",
    PositionsIgnored: "positions are ignored: every row is taken to begin at 0",
    LastKeysOnly: "the positions given are ignored: those of the last keys are taken",
    SharedByAll: "all objects of one size share the speeds of the first",
    RemembersByShape: "",
    NoHeadAxis: "the axis for the heads is missing",
    StaysFloat32: "the results stay float32",
    FirstRowForAll: "all rows are given the positions of the first",
    ThetaForgotten: "theta is always 10000",
    FullWidth: "",
    SinesFirst: "cosines and sines in the other order",
    RoundedTwice: "the angles are rounded to the dtype of x, not only their cosines",
}
RIGHT = [RightOuter, RightTableOfPairs]
SILENT = [
    StillLimitedByKeys,
    SpeedsAsParameter,
    LengthFromLastPosition,
    TableOneTooShort,
    LargeTable,
]
