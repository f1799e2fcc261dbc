"""Other right answers to hunt_masked_lanes."""

from lm_from_scratch.exercises.catalogue.hunt_masked_lanes.checks import LOAD, OTHER, TOP

RIGHT = [
    # the lowest finite number as padding
    {OTHER: "other=-3.4028234e38"},
    # masked lanes are set after the load
    {OTHER: "other=0.0", TOP: 'top = tl.max(tl.where(inside, value, -float("inf")), axis=0)'},
    # masked lanes read the last number again
    {LOAD: "value = tl.load(x + row * width + tl.minimum(column, width - 1))"},
    # the smallest of the negative numbers
    {LOAD: 'value = -tl.load(x + place, mask=inside, other=-float("inf"))',
     TOP: "top = -tl.min(value, axis=0)", "value - top": "-value - top"},
]  # fmt: skip

SURVIVORS = {
    "top = tl.max(value, axis=0): tl.max(value, axis=0) => tl.max(value)": (
        "a block of one axis has no other"
    )
}
