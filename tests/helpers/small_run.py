"""A run of training that is over in a second."""

#: Options of a `train` command that is over in a second, and the same whenever it is run: nothing
#: in it is chosen by measuring.
SMALL = [
    "--vocab-size", "300", "--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--block-size",
    "32", "--batch-size", "16", "--steps", "6", "--warmup", "1", "--eval-every", "3", "--quiet",
    "--library", "torch",
]  # fmt: skip
