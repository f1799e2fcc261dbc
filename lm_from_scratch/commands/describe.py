"""``describe``: which ideas the model of a ``config.json`` uses, and the lesson on each."""

import argparse
from pathlib import Path

from lm_from_scratch.checkpoint.folders import read_json, shipped, shipped_folder
from lm_from_scratch.checkpoint.ideas import complete, describe
from lm_from_scratch.commands.options import not_empty

EXAMPLES = """examples
  python -m lm_from_scratch describe qwen2-docs
  python -m lm_from_scratch describe path/to/model
  python -m lm_from_scratch describe downloads/config.json
"""


def add_options(p: argparse.ArgumentParser) -> None:
    """A folder, or the file itself."""
    p.description = (
        "Say which ideas a model uses, with the keys of its config.json that say so, and the page\n"
        "of the course on each. The weights are not read, and the model need not be one that this\n"
        "package can load."
    )
    p.epilog = EXAMPLES
    p.add_argument("model", type=not_empty, help="a folder with a config.json, or such a file")


def run(args: argparse.Namespace) -> int:
    """Print a line for each idea."""
    path = shipped_folder(args.model) if args.model in shipped() else Path(args.model)
    path = path / "config.json" if path.is_dir() else path
    config = read_json(path)
    family = complete(config)[1]
    print(f"{path}: {config.get('model_type', 'no model_type')}")
    for line in describe(config):
        print(f"  {line}")
    if family is None:
        print("  its family is not known here: what only its code does is not in this list")
    return 0
