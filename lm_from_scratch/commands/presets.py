"""Sets of numbers for ``train``, by name."""

import argparse
import textwrap
from typing import Any

#: Every preset is a set of defaults; any of its numbers can be changed on the command line.
PRESETS: dict[str, dict[str, Any]] = {
    "nano": dict(  # half a minute on a laptop: to see that it learns
        architecture="gpt2", corpus=["reference"], vocab_size=1024,
        n_layer=2, n_head=4, n_embd=64, block_size=64, dropout=0.0,
        batch_size=32, steps=300, lr=3e-3, min_lr=3e-4, warmup=50, eval_every=100,
    ),
    "docs": dict(  # the GPT-2 that ships with the package: half an hour to an hour on one core
        architecture="gpt2", corpus=["reference*2", "docstrings"], vocab_size=4096,
        n_layer=8, n_head=4, n_embd=128, block_size=256, dropout=0.2, optimizer="muon",
        batch_size=16, steps=2650, lr=4e-3, min_lr=1e-4, warmup=100, eval_every=200,
        dtype="auto",
    ),
    "tasks": dict(  # the model of tasks that ships with the package: twenty minutes on a core
        architecture="qwen2", corpus=["tasks"], vocab_size=261, chat_tokens=True,
        n_layer=3, n_head=4, n_kv_head=2, n_embd=128, intermediate_size=384, block_size=128,
        dropout=0.0, batch_size=8, steps=18000, lr=2e-3, min_lr=1e-5, warmup=300, eval_every=2000,
    ),
    "worlds": dict(  # the Qwen2 of small stories that ships with the package
        architecture="qwen2", corpus=["worlds"], vocab_size=640,
        n_layer=4, n_head=4, n_kv_head=2, n_embd=128, intermediate_size=512, block_size=256,
        initializer_range=0.06, dropout=0.0, optimizer="muon", batch_size=16, steps=6000,
        lr=4e-3, min_lr=1e-4, warmup=100, eval_every=500,
    ),
    "finetune": dict(  # for a model that has learned already: small steps, a short warm-up
        corpus=["reference"], block_size=128, batch_size=8, steps=300, lr=5e-5, min_lr=5e-6,
        warmup=30, eval_every=100,
    ),
    "sft": dict(  # answers to questions, by a small model; a published one wants a tenth of the lr
        block_size=128, batch_size=32, steps=300, lr=1e-3, min_lr=1e-4, warmup=20, eval_every=100,
    ),
    "dpo": dict(block_size=128, batch_size=32, steps=100, lr=1e-4, min_lr=1e-5, warmup=10,
        eval_every=50,
    ),
    "grpo": dict(batch_size=256, block_size=128, steps=100, lr=1e-4, min_lr=1e-5, warmup=5,
        eval_every=0,
    ),
}  # fmt: skip

#: The Qwen2 that ships with the package: as many weights, and all else as for the GPT-2.
PRESETS["docs-qwen2"] = {
    **PRESETS["docs"], "architecture": "qwen2", "n_kv_head": 2, "intermediate_size": 384,
}  # fmt: skip

#: What the presets say: the help shows no other default, and parsing sets none.
OF_PRESETS: dict[str, Any] = dict.fromkeys(name for said in PRESETS.values() for name in said)
OF_PRESET = argparse.SUPPRESS


def presets_text() -> str:
    """The presets as options, for the help."""
    return "\n".join(
        textwrap.fill(
            ", ".join(
                f"{name.replace('_', '-')}={','.join(value) if type(value) is list else value}"
                for name, value in values.items()
            ),
            width=88,
            initial_indent=f"  {preset:10} ",
            subsequent_indent=" " * 13,
            break_on_hyphens=False,
        )
        for preset, values in PRESETS.items()
    )
