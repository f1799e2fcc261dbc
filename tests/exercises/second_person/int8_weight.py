"""Answers to int8_weight that were written from its text alone."""

import torch


class RightByWhere:
    def __init__(self, weight):
        self.build(weight.detach())

    def wide(self, x):
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def build(self, w):
        self.scale = (self.wide(w).abs().amax(1, keepdim=True) / 127).to(w.dtype)
        self.codes = self.count(self.wide(w), self.wide(self.scale))

    def count(self, w, s):
        codes = torch.where(s > 0, w / s, 0).round().clamp(-127, 127)
        return codes.to(torch.int8).contiguous()

    def dequantize(self):
        return (self.wide(self.scale) * self.codes).to(self.scale.dtype)


class RightRowByRow(RightByWhere):
    def build(self, w):
        rows = []
        scales = []
        for row in self.wide(w):
            s = (row.abs().max() / 127).to(w.dtype)
            scales.append(s)
            q = (row / s.to(row.dtype)).round() if s != 0 else row * 0
            rows.append(q.clamp(-127, 127).to(torch.int8))
        self.scale = torch.stack(scales)[:, None]
        self.codes = torch.stack(rows)

    def dequantize(self):
        return self.codes.to(self.scale.dtype) * self.scale


class ScaleOfColumns(RightByWhere):
    def build(self, w):
        self.scale = (self.wide(w).abs().amax(0, keepdim=True) / 127).to(w.dtype)
        self.codes = self.count(self.wide(w), self.wide(self.scale))


class ScaleOfTheMatrix(RightByWhere):
    def build(self, w):
        top = self.wide(w).abs().max().expand(w.shape[0], 1)
        self.scale = (top / 127).to(w.dtype)
        self.codes = self.count(self.wide(w), self.wide(self.scale))


class DividedBy128(RightByWhere):
    def build(self, w):
        self.scale = (self.wide(w).abs().amax(1, keepdim=True) / 128).to(w.dtype)
        self.codes = self.count(self.wide(w), self.wide(self.scale))


class MaximumWithoutSign(RightByWhere):
    def build(self, w):
        self.scale = (self.wide(w).amax(1, keepdim=True) / 127).to(w.dtype)
        self.codes = self.count(self.wide(w), self.wide(self.scale))


class ScaleBeforeItIsStored(RightByWhere):
    def build(self, w):
        s = self.wide(w).abs().amax(1, keepdim=True) / 127
        self.codes, self.scale = self.count(self.wide(w), s), s.to(w.dtype)


class CutNotRounded(RightByWhere):
    def count(self, w, s):
        return torch.where(s > 0, w / s, 0).clamp(-127, 127).to(torch.int8).contiguous()


class HalvesUp(RightByWhere):
    def count(self, w, s):
        q = torch.where(s > 0, w / s, 0)
        return (q + 0.5).floor().clamp(-127, 127).to(torch.int8).contiguous()


class HalvesAwayFromZero(RightByWhere):
    def count(self, w, s):
        q = torch.where(s > 0, w / s, 0)
        q = torch.sign(q) * (q.abs() + 0.5).floor()
        return q.clamp(-127, 127).to(torch.int8).contiguous()


class DownToMinus128(RightByWhere):
    def count(self, w, s):
        q = torch.where(s > 0, w / s, 0).round().clamp(-128, 127)
        return q.to(torch.int8).contiguous()


class NotClamped(RightByWhere):
    def count(self, w, s):
        return torch.where(s > 0, w / s, 0).round().to(torch.int64).to(torch.int8).contiguous()


class ZeroRowDividedByZero(RightByWhere):
    def count(self, w, s):
        return (w / s).round().clamp(-127, 127).to(torch.int8).contiguous()


class ScaleClampedAtEps(RightByWhere):
    def build(self, w):
        self.scale = (self.wide(w).abs().amax(1, keepdim=True) / 127).clamp(min=1e-8).to(w.dtype)
        self.codes = self.count(self.wide(w), self.wide(self.scale))


class QuotientByScalePlusEps(RightByWhere):
    def count(self, w, s):
        return (w / (s + 1e-6)).round().clamp(-127, 127).to(torch.int8).contiguous()


class ZeroRowsGetScaleOne(RightByWhere):
    def build(self, w):
        super().build(w)
        self.scale = torch.where(self.scale == 0, 1, self.scale).to(w.dtype)


class QuotientInTheNarrowDtype(RightByWhere):
    def wide(self, x):
        return x


class AlwaysFloat32(RightByWhere):
    def wide(self, x):
        return x.float()


class ScaleInFloat32(RightByWhere):
    def build(self, w):
        super().build(w)
        self.scale = self.scale.float()


class ScaleWithoutColumn(RightByWhere):
    def build(self, w):
        super().build(w)
        self.scale = self.scale.squeeze(1)

    def dequantize(self):
        return self.codes.to(self.scale.dtype) * self.scale[:, None]


class CodesInTheOrderOfTheWeight(RightByWhere):
    def count(self, w, s):
        return torch.where(s > 0, w / s, 0).round().clamp(-127, 127).to(torch.int8)


class GraphKept(RightByWhere):
    def __init__(self, weight):
        self.build(weight)


class MatrixKept(RightByWhere):
    def build(self, w):
        super().build(w)
        self.matrix = super().dequantize()

    def dequantize(self):
        return self.matrix


class QuotientTimesInverse(RightByWhere):
    def count(self, w, s):
        q = w * (127 / w.abs().amax(1, keepdim=True)).nan_to_num(0, 0, 0)
        return q.round().clamp(-127, 127).to(torch.int8).contiguous()


class ShiftedLikeUint8(RightByWhere):
    def build(self, w):
        x = self.wide(w)
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        self.low = low
        self.scale = ((high - low) / 254).to(w.dtype)
        q = torch.where(self.scale > 0, (x - low) / self.wide(self.scale), 0).round() - 127
        self.codes = q.clamp(-127, 127).to(torch.int8).contiguous()

    def dequantize(self):
        x = (self.codes.to(self.low.dtype) + 127) * self.wide(self.scale) + self.low
        return x.to(self.scale.dtype)


class WeightClampedInPlace(RightByWhere):
    def build(self, w):
        self.scale = (self.wide(w).abs().amax(1, keepdim=True) / 127).to(w.dtype)
        self.codes = self.count(self.wide(w), self.wide(self.scale))
        w.copy_(self.dequantize())


ANSWERS = {
    ScaleOfColumns: "a scale for each column, not for each row",
    ScaleOfTheMatrix: "one scale for the whole matrix",
    DividedBy128: "a quotient by 128 in the place of 127",
    MaximumWithoutSign: "the largest number, not the largest absolute one",
    ScaleBeforeItIsStored: "the codes are those of a scale that was not yet rounded",
    CutNotRounded: "cut off instead of rounded",
    HalvesUp: "a half always goes up",
    HalvesAwayFromZero: "a half goes away from zero",
    DownToMinus128: "codes down to -128",
    NotClamped: "no clamp: a code above 127 becomes a negative one",
    ZeroRowDividedByZero: "a quotient by a scale of 0",
    ScaleClampedAtEps: "a smallest scale, which is too large for small rows",
    QuotientByScalePlusEps: "a small number is added to the divisor",
    ZeroRowsGetScaleOne: "a row of zeros gets a scale of 1",
    QuotientInTheNarrowDtype: "the quotient in half precision",
    AlwaysFloat32: "",
    ScaleInFloat32: "",
    ScaleWithoutColumn: "",
    CodesInTheOrderOfTheWeight: "the codes have the weight's order in memory",
    GraphKept: "the scale is a part of the model's graph",
    MatrixKept: "the matrix is computed once and kept, beside the codes",
    QuotientTimesInverse: "the codes are those of a scale that was not yet rounded",
    ShiftedLikeUint8: "",
    WeightClampedInPlace: "",
}
RIGHT = [RightByWhere, RightRowByRow]
