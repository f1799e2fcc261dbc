"""Turn a finished training run into a model that ships with the package.

    python -m lm_from_scratch train --preset docs --dtype bfloat16 --out RUN
    python -m lm_from_scratch.pretrained.make RUN gpt2-docs

    python -m lm_from_scratch train --preset docs-qwen2 --dtype bfloat16 --out RUN
    python -m lm_from_scratch.pretrained.make RUN qwen2-docs

    python -m lm_from_scratch train --preset tasks --dtype float32 --out RUN
    python -m lm_from_scratch.pretrained.make RUN tasks

    python -m lm_from_scratch train --preset worlds --dtype bfloat16 --out RUN
    python -m lm_from_scratch.pretrained.make RUN worlds

The weights are rounded to float16, which halves the file. ``record.json`` says how they were made
and how good they are: the held-out loss of the rounded weights, and of simpler ways to predict or
compress the same text; of a model of tasks also how many of its answers are right, and of one that
tells stories how many of them hold together.

A run keeps its last two checkpoints, and each into which somebody has put a file. The latter are
stored, too, for pages that look at how a model came to be: those of ``worlds`` are from a run with
``--checkpoint-every 50``, which does not change what it computes.

The minutes come from the speeds in the log. On a machine that does other things too they are too
many: a third argument says how many there were, as ``time`` counts them.
"""

import copy
import gzip
import hashlib
import json
import lzma
import math
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lm_from_scratch.checkpoint.folders import (
    PRETRAINED,
    replace_folder,
    temporary_folder,
    write_json,
)
from lm_from_scratch.checkpoint.state import checkpoints, is_ours
from lm_from_scratch.checkpoint.weights import load_checkpoint, save_pretrained, write_model
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.pretrained.coherence import coherence
from lm_from_scratch.pretrained.exact_match import of_task
from lm_from_scratch.pretrained.readme import readme, stride
from lm_from_scratch.text.batches import TokenFile, sequential_batches, write_tokens
from lm_from_scratch.text.corpora import load_split
from lm_from_scratch.text.document import Document
from lm_from_scratch.text.story_grammar import LANGUAGES
from lm_from_scratch.text.tasks import TASKS
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.train import evaluate
from lm_from_scratch.weights.quantize import quantize_

LN2 = math.log(2.0)


def digest(documents: Sequence[Document]) -> str:
    """A fingerprint of the text: another Python version has another standard library."""
    text = "\0".join(document.text for document in documents)
    return hashlib.sha256(text.encode()).hexdigest()


def measure(nats_per_token: float, file: TokenFile) -> dict[str, float]:
    """A loss per token, and the same as bits per byte of text.

    The first token of the file is never predicted, so there is one target fewer than tokens.
    """
    bits = nats_per_token * (file.n_tokens - 1) / LN2
    return {
        "nats_per_token": round(nats_per_token, 4),
        "bits_per_byte": round(bits / file.n_bytes, 4),
    }


def held_out_losses(
    model: CausalLM, tokenizer: Tokenizer, held_out: Sequence[Document]
) -> dict[str, dict[str, float]]:
    """The loss on all held-out text, and on each corpus (the part of a name before the slash)."""
    parts = {"all": list(held_out)}
    for document in held_out:
        parts.setdefault(document.name.split("/")[0], []).append(document)
    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, documents in parts.items():
            file = write_tokens(documents, tokenizer, Path(folder) / f"{name}.bin")
            batches = sequential_batches(file, 16, model.config.block_size)
            losses[name] = measure(evaluate(model, batches), file)
    return losses


def baselines(
    tokenizer: Tokenizer, train: Sequence[Document], held_out: Sequence[Document]
) -> dict[str, dict[str, float]]:
    """What simpler means reach on the held-out text.

    *unigram* knows how often each token occurs in the training text (plus one) and nothing else.
    gzip and xz compress the held-out text alone; *xz after the training text* has read that first,
    as the model has.
    """
    with tempfile.TemporaryDirectory() as folder:
        seen = write_tokens(train, tokenizer, Path(folder) / "train.bin")
        file = write_tokens(held_out, tokenizer, Path(folder) / "held_out.bin")
        counts = np.bincount(seen.tokens, minlength=tokenizer.vocab_size) + 1.0
        unigram = float(-np.log(counts / counts.sum())[np.asarray(file.tokens[1:])].mean())
        uniform = math.log(tokenizer.vocab_size)
        table = {"uniform": measure(uniform, file), "unigram": measure(unigram, file)}
        n_bytes = file.n_bytes
    text = "".join(document.text for document in held_out).encode()
    before = "".join(document.text for document in train).encode()
    sizes = {
        "gzip": len(gzip.compress(text, 9)),
        "xz": len(lzma.compress(text, preset=9)),
        "xz after the training text": len(lzma.compress(before + text, preset=9))
        - len(lzma.compress(before, preset=9)),
    }
    for name, size in sizes.items():
        table[name] = {"bits_per_byte": round(8 * size / n_bytes, 4)}
    return table


def corpus_of(record: dict[str, Any]) -> tuple[list[Document], list[Document]]:
    """The train and held-out documents of a recorded run, from this machine's standard library."""
    arguments = record["arguments"]
    return load_split(arguments["corpus"], arguments["held_out"])


def main(run: str, name: str, core_minutes: str = "") -> None:
    """Write the shipped folder ``name`` from the finished run."""
    folder = Path(run)
    arguments = json.loads((folder / "recipe.json").read_text())["arguments"]
    steps = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    if steps[-1]["step"] != arguments["steps"]:
        raise SystemExit(f"{run} is at step {steps[-1]['step']} of {arguments['steps']}")
    tokenizer = Tokenizer.load(folder)
    checkpoint = load_checkpoint(folder / "model", "causal_lm")
    model = checkpoint.model.half()
    train, held_out = corpus_of({"arguments": arguments})
    rounded = copy.deepcopy(model).float()
    tokens = arguments["batch_size"] * arguments["block_size"]
    minutes = sum(tokens / step["tokens_per_second"] for step in steps) / 60
    record = {
        "name": name,
        "command": f"python -m lm_from_scratch train --preset {arguments['preset']} "
        f"--dtype {arguments.get('dtype', 'float32')} --out RUN",  # a preset's is the machine's
        "arguments": {k: v for k, v in arguments.items() if k not in ("out", "quiet")},
        "seed": arguments["seed"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in rounded.parameters()),
        "steps": arguments["steps"],
        "tokens_trained_on": arguments["steps"] * tokens,
        "core_minutes": round(float(core_minutes or minutes), 1),
        "held_out_sha256": digest(held_out),
        "held_out": held_out_losses(rounded, tokenizer, held_out),
        "baselines": baselines(tokenizer, train, held_out),
    }
    if arguments["corpus"] == ["tasks"]:
        record["exact_match"] = {name: of_task(rounded, tokenizer, name) for name in TASKS}
    if arguments["corpus"] == ["worlds"]:
        record["worlds"] = {name: coherence(rounded, tokenizer, name) for name in LANGUAGES}
    with temporary_folder(PRETRAINED / name) as temporary:
        write_model(model, temporary, published=checkpoint.published)
        tokenizer.save(temporary)
        record["earlier_steps"] = write_steps(folder, temporary)
        write_json(temporary / "record.json", record)
        (temporary / "log.jsonl").write_text("".join(map(shorter, thinned(steps))))
        (temporary / "README.md").write_text(readme(record), encoding="utf-8")
        replace_folder(temporary, PRETRAINED / name)


def write_steps(run: Path, folder: Path) -> list[int]:
    """Write the checkpoints of a run that hold a file of somebody's into folders of their own, and
    return their steps.

    The matrices of an MLP get 4 bits and all others 8, which is a third of float16. What the models
    answer, and where their heads look, changes by a hundredth or less; with 4 bits in all matrices
    it changes by several.
    """
    kept = [checkpoint for checkpoint in checkpoints(run) if not is_ours(checkpoint)]
    for path in kept:
        checkpoint = load_checkpoint(path, "causal_lm")
        model = checkpoint.model.half()
        quantize_(model, 4, select=lambda name: ".mlp." in name)
        quantize_(model, 8, select=lambda name: ".mlp." not in name)
        save_pretrained(model, folder / path.name, published=checkpoint.published)
    return [int(path.name.removeprefix("step-")) for path in kept]


def thinned(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most about 4000 steps of a long run, and all those with a held-out loss."""
    every = stride(len(steps))
    return [s for s in steps if s["step"] % every == 0 or s["held_out_loss"] is not None]


def shorter(step: dict[str, Any]) -> str:
    """A line of the log with as many digits as a figure shows."""
    short = {key: float(f"{v:.5g}") if type(v) is float else v for key, v in step.items()}
    return json.dumps(short) + "\n"


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(*sys.argv[1:])
