"""``describe``: which ideas the model of a ``config.json`` uses, and the lesson on each."""

from pathlib import Path

from lm_from_scratch.checkpoint.folders import ADAPTER, read_json, shipped, shipped_folder
from lm_from_scratch.checkpoint.ideas import complete, describe
from lm_from_scratch.commands.options import DescribeOptions
from lm_from_scratch.files import escaped
from lm_from_scratch.interop.peft import base_folder


def run(options: DescribeOptions) -> int:
    """Print a line for each idea."""
    folder = shipped_folder(options.model) if options.model in shipped() else Path(options.model)
    path = base_folder(folder) / "config.json" if folder.is_dir() else folder
    config = read_json(path)
    family = complete(config)[1]
    print(f"{path}: {escaped(str(config.get('model_type', 'no model_type')))}")
    if (folder / ADAPTER).is_file():
        print(f"  adapter, added to its weights: {folder / ADAPTER}")
    for line in describe(config):
        print(f"  {escaped(str(line))}")
    if config.get("model_type") == "gpt2":
        print("  a GPT-2, from which all later ideas set out -> 1_gpt2/2_gpt2")
    elif family is None:
        print("  its family is not known here: what only its code does is not in this list")
    return 0
