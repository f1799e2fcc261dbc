"""Answers to int8_weight: other right ones, and wrong ones of a second person."""

import torch


class ByNumbers:
    """One number after the other, in Python's own float64."""

    def __init__(self, weight):
        N, K = weight.shape
        largest = [max(abs(x) for x in row) for row in weight.tolist()]
        self.scale = torch.tensor([[x / 127] for x in largest]).double().to(weight.dtype)
        if weight.dtype == torch.float64:
            self.scale = torch.tensor([[x / 127] for x in largest], dtype=torch.float64)
        self.codes = torch.zeros(N, K, dtype=torch.int8)
        for n, s in enumerate(self.scale.flatten().tolist()):
            for k in range(K if s else 0):
                self.codes[n, k] = max(-127, min(127, round(weight[n, k].item() / s)))

    def dequantize(self):
        return torch.mul(self.scale, self.codes.to(self.scale.dtype))


class ByInverse:
    """A product with the inverse of the scale, in float64."""

    def __init__(self, weight):
        wide = weight.detach().double()
        self.scale = torch.maximum(wide.amax(1), -wide.amin(1)).div(127).to(weight.dtype)[:, None]
        inverse = self.scale.double().reciprocal().nan_to_num(posinf=0.0)
        codes = (wide * inverse).clamp(-127, 127).round().char()
        self.codes = codes.clone(memory_format=torch.contiguous_format)

    def dequantize(self):
        return (self.codes.double() * self.scale.double()).to(self.scale.dtype)


class ByRows:
    """Row by row, with any divisor but 0 where the scale is 0."""

    def __init__(self, weight):
        with torch.no_grad():
            wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
            scales, codes = [], []
            for row in wide:
                scale = (torch.linalg.vector_norm(row, ord=torch.inf) / 127).to(weight.dtype)
                codes.append((row / (scale if scale > 0 else 1)).round().clamp(-127, 127))
                scales.append(scale)
            self.scale, self.codes = torch.stack(scales)[:, None], torch.stack(codes).char()

    def dequantize(self):
        return torch.einsum("nk,nl->nk", self.codes.to(self.scale.dtype), self.scale)


class ByFakeQuantization:
    """torch's own rounding to a channel's scale, in float64."""

    def __init__(self, weight):
        wide = weight.detach().double()
        largest = torch.aminmax(wide.abs(), dim=1, keepdim=True).max
        self.scale = (largest / 127).to(weight.dtype)
        safe = self.scale.double().masked_fill(self.scale == 0, 1)
        self.codes = torch.empty(weight.shape, dtype=torch.int8)
        self.codes.copy_(torch.round(wide.div(safe)).clip(-127, 127))

    def dequantize(self):
        return torch.diag(self.scale.flatten()) @ self.codes.to(self.scale.dtype)


RIGHT = [ByNumbers, ByInverse, ByRows, ByFakeQuantization]

DONE = "self.codes = codes.to(torch.int8).contiguous()"
RESULT = "return self.codes * self.scale"

WRONG = [
    ("float64 is rounded to float32",
     {"weight if weight.dtype == torch.float64 else weight.float()": "weight.float()"}),
    ("the scale is float32", {DONE: f"{DONE}\n        self.scale = self.scale.float()"}),
    ("the scale has no column",
     {DONE: f"{DONE}\n        self.scale = self.scale[:, 0]", RESULT: f"{RESULT}[:, None]"}),
    ("a range from the smallest number to the largest",
     {"largest = precise.abs().amax(dim=1, keepdim=True)":
      "self.low = precise.amin(1, keepdim=True)\n"
      "        largest = (precise.amax(1, keepdim=True) - self.low) / 2",
      "precise / self.scale)": "(precise - self.low) / self.scale) - 127",
      RESULT: "return ((self.codes + 127.0) * self.scale + self.low).to(self.scale.dtype)"}),
    ("the weight itself is rounded", {DONE: f"{DONE}\n        weight.copy_(self.dequantize())"}),
]  # fmt: skip
