"""Other right answers to softmax_kernel."""

from lm_from_scratch.exercises.catalogue.softmax_kernel.checks import OTHER, E, P
from lm_from_scratch.exercises.source import SOLUTION, written

((_, BODY),) = SOLUTION.findall(written("softmax_kernel"))

ONLINE = """\
    x += tl.program_id(0) * x_stride
    out += tl.program_id(0) * out_stride
    top = -3.4028234e38
    total = 0.0
    for start in range(0, BLOCK, BLOCK // 2):
        column = start + tl.arange(0, BLOCK // 2)
        value = tl.load(x + column, mask=column < width, other=-float("inf")).to(tl.float32)
        raised = tl.maximum(top, tl.max(value, axis=0))
        total = total * tl.exp(top - raised) + tl.sum(tl.exp(value - raised), axis=0)
        top = raised
    column = tl.arange(0, BLOCK)
    value = tl.load(x + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + column, tl.exp(value - top) / total, mask=column < width)
"""

RIGHT = [
    # powers of 2, of the number times log2(e)
    {E: "e = tl.exp2((value - tl.max(value, axis=0)) * 1.4426950408889634)"},
    # the logarithm of the sum is subtracted
    {P: "p = tl.exp(value - tl.max(value, axis=0) - tl.log(tl.sum(e, axis=0)))"},
    # two half blocks with an online sum
    {BODY: ONLINE},
    # masked lanes do not count in the sum
    {OTHER: "other=0.0",
     E: "top = tl.max(tl.where(inside, value, -float('inf')), axis=0)\n"
      "    e = tl.where(inside, tl.exp(value - top), 0.0)"},
]  # fmt: skip

SURVIVORS = {
    "p = e / tl.sum(e, axis=0): tl.sum(e, axis=0) => tl.sum(e)": (
        "a block of one axis has no other"
    ),
    "e = tl.exp(value - tl.max(value, axis=0)): tl.max(value, axis=0) => tl.max(value)": (
        "a block of one axis has no other"
    ),
}
