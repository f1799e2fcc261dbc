"""Answers to mxfp4_block: other right ones, and wrong ones of a second person."""

import math

import torch

SIZES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def by_numbers(x):
    """One number after the other, in Python's own float64."""
    codes, scales, numbers = [], [], []
    for row in x.tolist():
        largest = max(map(abs, row))
        e = max(math.frexp(largest)[1] - 3, -127) if largest else -127
        nearest = [
            min(range(8), key=lambda c: (abs(SIZES[c] - abs(v) / 2.0**e), c % 2)) for v in row
        ]
        codes.append([c + 8 * (v < 0) for c, v in zip(nearest, row)])
        numbers.append([math.copysign(SIZES[c], v) * 2.0**e for c, v in zip(nearest, row)])
        scales.append(e + 127)
    byte = torch.uint8
    return torch.tensor(codes, dtype=byte), torch.tensor(scales, dtype=byte), torch.tensor(numbers)


def by_borders(x):
    """How many borders between two magnitudes a number has passed, those with an odd number above
    at the border already."""
    wide = x.double()
    e = (torch.frexp(wide.abs().amax(1)).exponent - 3).clamp(min=-127)
    e = torch.where((wide == 0).all(1), -127, e)
    scaled = wide.abs() / torch.exp2(e.double())[:, None]
    code = torch.zeros_like(x, dtype=torch.long)
    for number, border in enumerate([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], start=1):
        code += scaled >= border if number % 2 == 0 else scaled > border
    size = torch.tensor(SIZES).double()[code] * torch.exp2(e.double())[:, None]
    numbers = torch.where(x.signbit(), -size, size).float()
    return (code | x.signbit().long() << 3).byte(), (e + 127).byte(), numbers


def by_distances(x):
    """The smallest of all distances; of two equal ones the even one."""
    wide = x.double()
    e = wide.abs().max(dim=-1).values.log2().floor().sub(2).clamp(-127, 127)
    table = torch.tensor(SIZES, dtype=torch.float64)
    away = (wide.abs()[..., None] * torch.exp2(-e)[:, None, None] - table).abs()
    away[..., 1::2] += 1e-12
    code = away.argmin(-1)
    numbers = table[code] * wide.sign() * torch.exp2(e)[:, None]
    return code.add(x.lt(0) * 8).to(torch.uint8), e.add(127).to(torch.uint8), numbers.float()


def by_table(x):
    """Sixteen values, of which a code is an index."""
    values = torch.tensor([*SIZES, *(-size for size in SIZES)])
    power = torch.floor(torch.log2(x.float().abs().amax(-1))) - 2
    power = power.nan_to_num(neginf=-127).clamp_(min=-127)
    scaled = torch.ldexp(x.float(), -power[:, None].int())
    size = scaled.abs().clamp(max=6)
    e = torch.frexp(size).exponent.clamp(1, 3) - 1
    step = torch.ldexp(torch.full_like(size, 0.5), e)
    code = ((size / step).round() + 2 * e).long() + 8 * (scaled < 0)
    numbers = torch.ldexp(values[code], power[:, None].int())
    return code.to(torch.uint8), (power.int() + 127).to(torch.uint8), numbers


RIGHT = [by_numbers, by_borders, by_distances, by_table]

RESULT = "return codes.to(torch.uint8), scales, numbers"

WRONG = [
    ("two codes in a byte",
     {RESULT: "codes = codes[:, ::2] + 16 * codes[:, 1::2]\n    " + RESULT}),
    ("the codes count from the most negative value", {"+ 8 * (x < 0)": "+ 7 * (x >= 0)"}),
    ("the numbers of a block as large as 8", {".clamp(max=6)": ".clamp(max=8)"}),
    ("the largest exponent of all blocks",
     {"largest = size": "largest = 0 * size.amax(dim=1, keepdim=True) + size.amax()  #"}),
    ("the magnitudes of an int4: 0 to 7",
     {"step = 0.5 + 0.5 * (scaled >= 2) + 1.0 * (scaled >= 4)": "step = 1.0",
      "torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])": "torch.arange(8.0)"}),
]  # fmt: skip

STEP = "step = 0.5 + 0.5 * (scaled >= 2) + 1.0 * (scaled >= 4)"
TABLE = "magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])"

SURVIVORS = {
    f"{STEP}: scaled >= 2 => scaled > 2": "2 is a multiple of both steps",
    f"{STEP}: scaled >= 4 => scaled > 4": "4 is a multiple of both steps",
    f"{TABLE}: 6.0 => 12.0": "what is above 4 finds the last place in any case",
    "numbers = torch.where(x < 0, -rounded, rounded) * 2.0 ** exponent: x < 0 => x <= 0": (
        "-0.0 equals 0.0"
    ),
}
