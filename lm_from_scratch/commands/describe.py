"""``describe``: which ideas the model of a ``config.json`` uses, and the lesson on each."""

from pathlib import Path

from lm_from_scratch.checkpoint.folders import read_json, shipped, shipped_folder
from lm_from_scratch.checkpoint.ideas import complete, describe
from lm_from_scratch.commands.options import DescribeOptions


def run(options: DescribeOptions) -> int:
    """Print a line for each idea."""
    path = shipped_folder(options.model) if options.model in shipped() else Path(options.model)
    path = path / "config.json" if path.is_dir() else path
    config = read_json(path)
    family = complete(config)[1]
    print(f"{path}: {config.get('model_type', 'no model_type')}")
    for line in describe(config):
        print(f"  {line}")
    if family is None:
        print("  its family is not known here: what only its code does is not in this list")
    return 0
