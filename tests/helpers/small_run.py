"""A run of training that is over in a second."""

#: Options of a `train` command that is over in a second.
SMALL = [
    "--vocab-size", "300", "--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--block-size",
    "32", "--batch-size", "4", "--steps", "6", "--warmup", "1", "--eval-every", "3", "--quiet",
]  # fmt: skip
