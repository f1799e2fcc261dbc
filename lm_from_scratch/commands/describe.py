"""``describe``: which ideas the model of a ``config.json`` uses, and the lesson on each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_from_scratch.checkpoint.cache_sizes import cached_numbers, states
from lm_from_scratch.checkpoint.families import complete
from lm_from_scratch.checkpoint.folders import ADAPTER, read_json, shipped, shipped_folder
from lm_from_scratch.checkpoint.ideas import describe
from lm_from_scratch.commands.options import DescribeOptions
from lm_from_scratch.files import escaped
from lm_from_scratch.interop.peft import base_folder

#: The length of a text for which the cache is counted.
TOKENS = 32_768


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
    else:
        print(f"  {memory(config)}")
    return 0


def memory(config: Mapping[str, Any]) -> str:
    """What a text takes in the cache."""
    try:
        keys, fixed = cached_numbers(config, TOKENS), states(config)
    except ValueError as error:
        return f"its cache is not counted: {error}"
    text = f"cache of {TOKENS:,} tokens in 16 bits: {2 * keys / 1e6:,.0f} MB"
    return f"{text}, and {2 * fixed / 1e6:,.0f} MB of states" if fixed else text
