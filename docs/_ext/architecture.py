"""Tables of the package: what each room is for, its files and imports; the names of config fields
here and in `transformers`."""

from dataclasses import fields
from pathlib import Path

import api
import gallery
import modules
import rst
from modules import PACKAGE


def graph(root: Path = gallery.ROOT) -> dict[str, set[str]]:
    """What each file of the package imports from it, inside functions too."""
    known = modules.modules(root)
    return {
        module: {
            next((m for m in (f"{source}.{name}", source) if m in known), PACKAGE)
            for source, name in modules.imported(path)
        }
        - {module, PACKAGE}
        for module, path in known.items()
    }


def below(room: str) -> list[str]:
    """The rooms that a room imports from, the highest first; a file in no room counts as none."""
    found = {
        modules.room(other)
        for module, imported in graph().items()
        if modules.room(module) == room
        for other in imported
    }
    return [name for name in reversed(modules.rooms()) if name in found - {room}]


def rooms() -> str:
    """The highest first, so that a room imports from those below it."""
    rows = [["room", "what it is for", "files", "imports from"]]
    for room, members in reversed(api.by_room().items()):
        own = f"{PACKAGE}.{room}"
        name = f":doc:`{room} </api/{own}>`" if own in members else f"``{room}``"
        purpose = modules.summary(modules.modules()[own]) if room else ""
        files = [m.rpartition(".")[::2] for m in members if m != own]
        links = ", ".join(f":doc:`{file} </api/{folder}.{file}>`" for folder, file in files)
        lower = ", ".join(f"``{other}``" for other in below(room))
        rows.append([name if room else "beside the rooms", purpose, links, lower])
    return rst.table(rows, ":widths: 14 30 34 22")


def config_names() -> str:
    """The fields of both configs that `transformers` calls something else."""
    from lm_from_scratch.checkpoint.configs import GPT2_NAMES
    from lm_from_scratch.checkpoint.dialects import DECODER_NAMES
    from lm_from_scratch.models.gpt2 import GPT2Config
    from lm_from_scratch.models.qwen2 import Qwen2Config

    rows = [["here", "GPT-2 in ``transformers``", "Qwen2 in ``transformers``"]]
    for name in dict.fromkeys([*GPT2_NAMES, *DECODER_NAMES, "n_layer", "n_head", "n_embd"]):
        theirs = [
            f"``{names.get(name, name)}``" if name in {f.name for f in fields(config)} else "–"
            for config, names in ((GPT2Config, GPT2_NAMES), (Qwen2Config, DECODER_NAMES))
        ]
        rows.append([f"``{name}``", *theirs])
    return rst.table(rows)
