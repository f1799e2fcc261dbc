"""What the page on symbols reads: the names of config fields here and in `transformers`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import rst


def config_names() -> str:
    """A table of the fields of both configs that `transformers` calls something else."""
    from lm_from_scratch.checkpoint.configs import GPT2_NAMES, QWEN2_NAMES
    from lm_from_scratch.models.gpt2 import GPT2Config
    from lm_from_scratch.models.qwen2 import Qwen2Config

    columns = [(GPT2Config, GPT2_NAMES), (Qwen2Config, QWEN2_NAMES)]
    known = [{field.name for field in fields(config)} for config, _ in columns]
    rows = [["here", "GPT-2 in ``transformers``", "Qwen2 in ``transformers``"]]
    for name in dict.fromkeys([*GPT2_NAMES, *QWEN2_NAMES, "n_layer", "n_head", "n_embd"]):
        theirs = [
            f"``{names.get(name, name)}``" if name in own else "–"
            for (_, names), own in zip(columns, known, strict=True)
        ]
        rows.append([f"``{name}``", *theirs])
    return "\n".join(rst.table(rows))


def write(app: Any) -> None:
    rst.write({Path(app.srcdir) / "generated" / "config_names.rst": config_names()})


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", write, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
