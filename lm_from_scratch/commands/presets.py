"""Sets of numbers for ``train``, by name, and what they make of the command line."""

import textwrap
from dataclasses import dataclass, fields, replace
from typing import Any

from lm_from_scratch.commands.fields import Command, Options
from lm_from_scratch.commands.train_options import (
    WAYS,
    Classify,
    Dpo,
    FromFolder,
    Grpo,
    NewModel,
    Pretrain,
    RunOptions,
    Sft,
    StepOptions,
    TrainOptions,
)


@dataclass(frozen=True)
class Preset:
    """Numbers that go together; any of them can be changed on the command line."""

    steps: StepOptions
    model: NewModel | None = None  # with --from there is one already
    corpus: tuple[str, ...] = ()


DOCS = StepOptions(
    block_size=256, dropout=0.2, optimizer="muon", batch_size=16, steps=2650, lr=4e-3, min_lr=1e-4,
    warmup=100, eval_every=200, dtype="auto",
)  # fmt: skip
PRESETS: dict[str, Preset] = {
    "nano": Preset(  # half a minute on a laptop: to see that it learns
        StepOptions(block_size=64, dropout=0.0, batch_size=32, steps=300, lr=3e-3, min_lr=3e-4,
                    warmup=50, eval_every=100),
        NewModel(vocab_size=1024, n_layer=2, n_head=4, n_embd=64),
        ("reference",),
    ),
    "docs": Preset(  # the GPT-2 that ships with the package: half an hour to an hour on one core
        DOCS, NewModel(vocab_size=4096, n_layer=8, n_head=4, n_embd=128),
        ("reference*2", "docstrings"),
    ),
    "docs-qwen2": Preset(  # the Qwen2 that ships: as many weights, and all else as for the GPT-2
        DOCS, NewModel(architecture="qwen2", vocab_size=4096, n_layer=8, n_head=4, n_kv_head=2,
                       n_embd=128, intermediate_size=384),
        ("reference*2", "docstrings"),
    ),
    "tasks": Preset(  # the model of tasks that ships with the package: twenty minutes on a core
        StepOptions(block_size=128, dropout=0.0, batch_size=8, steps=18000, lr=2e-3, min_lr=1e-5,
                    warmup=300, eval_every=2000),
        NewModel(architecture="qwen2", vocab_size=261, chat_tokens=True, n_layer=3, n_head=4,
                 n_kv_head=2, n_embd=128, intermediate_size=384),
        ("tasks",),
    ),
    "worlds": Preset(  # the Qwen2 of small stories that ships with the package
        StepOptions(block_size=256, dropout=0.0, optimizer="muon", batch_size=16, steps=6000,
                    lr=4e-3, min_lr=1e-4, warmup=100, eval_every=500),
        NewModel(architecture="qwen2", vocab_size=640, n_layer=4, n_head=4, n_kv_head=2, n_embd=128,
                 intermediate_size=512, initializer_range=0.06),
        ("worlds",),
    ),
    "finetune": Preset(  # for a model that has learned already: small steps, a short warm-up
        StepOptions(block_size=128, batch_size=8, steps=300, lr=5e-5, min_lr=5e-6, warmup=30,
                    eval_every=100),
        corpus=("reference",),
    ),
    # answers to questions, by a small model; a published one wants a tenth of the lr
    "sft": Preset(
        StepOptions(block_size=128, batch_size=32, steps=300, lr=1e-3, min_lr=1e-4, warmup=20,
                    eval_every=100),
    ),
    "dpo": Preset(
        StepOptions(block_size=128, batch_size=32, steps=100, lr=1e-4, min_lr=1e-5, warmup=10,
                    eval_every=50),
    ),
    "grpo": Preset(
        StepOptions(block_size=128, batch_size=256, steps=100, lr=1e-4, min_lr=1e-5, warmup=5,
                    eval_every=0),
    ),
}  # fmt: skip


def presets_text() -> str:
    """The presets as options, for the help."""
    lines = []
    for name, preset in PRESETS.items():
        values = {"corpus": ",".join(preset.corpus)} if preset.corpus else {}
        for part in (preset.model, preset.steps):
            if part is not None:
                values |= {one.name: vars(part)[one.name] for one in fields(part)
                           if vars(part)[one.name] != one.default}  # fmt: skip
        text = ", ".join(f"{key.replace('_', '-')}={value}" for key, value in values.items())
        lines.append(
            textwrap.fill(
                text, width=88, initial_indent=f"  {name:10} ", subsequent_indent=" " * 13,
                break_on_hyphens=False,
            )
        )  # fmt: skip
    return "\n".join(lines)


def read(**given: Any) -> TrainOptions:
    """The run that the command line describes. Raises ``ValueError`` for options that the way to
    learn, or the folder of ``--from``, leaves no room for."""
    way, *others = [name for name in WAYS if name in given] or [""]
    if others:
        raise ValueError(f"--{others[0]} is not for --{way}")
    refuse_other_ways(way, given)
    source = given.get("from_")
    name = given.setdefault("preset", way if way in PRESETS else "finetune" if source else "nano")
    preset = PRESETS[name]
    if source is None and way in PRESETS:
        raise ValueError(f"--{way} is for a model that can write already: give --from")
    if source is None and "lora" in given:
        raise ValueError(f"--lora {given['lora']} is for a model that there is: give --from")
    if source is not None:
        for one in fields(NewModel):
            if one.name in given:
                raise ValueError(
                    f"{NewModel.flag(one.name)} {given[one.name]} is not for --from: the folder "
                    "says it"
                )
        model: NewModel | FromFolder = FromFolder(**of(FromFolder, given))
    elif preset.model is None:
        raise ValueError(f"--preset {name} is for a model that there is: give --from")
    else:
        model = replace(preset.model, **of(NewModel, given))
    steps = preset.steps
    if steps.warmup >= given.get("steps", steps.steps):  # of a run that was made shorter
        steps = replace(steps, warmup=max(0, given["steps"] // 10))
    if way == "grpo":  # every step says the reward
        if given.get("eval_every"):
            raise ValueError("--eval-every is not for --grpo")
        steps = replace(steps, eval_every=0)
    if not way and not given.setdefault("corpus", preset.corpus):
        raise ValueError(f"--preset {name} has no text: give --corpus")
    kind: Any = WAYS.get(way, Pretrain)
    return TrainOptions(
        run=RunOptions(**of(RunOptions, given)),
        model=model,
        steps=replace(steps, **of(StepOptions, given)),
        way=kind(**of(kind, given)),
    )


def of(part: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The values that belong to a dataclass."""
    names = {one.name for one in fields(part)}
    return {name: value for name, value in given.items() if name in names}


def refuse_other_ways(way: str, given: dict[str, Any]) -> None:
    """Raises ``ValueError`` for an option of another way to learn."""
    own, text = of(WAYS.get(way, Pretrain), given), of(Pretrain, given)
    parts: dict[str, type[Options]] = {"": Pretrain, **WAYS}
    for other, part in parts.items():
        for name in of(part, given):
            if name in text and name not in own:
                raise ValueError(f"{part.flag(name)} is not for --{way}")
            if name not in own:
                raise ValueError(f"{part.flag(name)} {given[name]} is for --{other}")


EXAMPLES = """examples
  python -m lm_from_scratch train --out run
      a nano model on Python's language reference, in half a minute
  python -m lm_from_scratch train --out run --corpus my-notes/ --steps 2000 --n-embd 128
      your own text: a file, or a folder of .txt .md .rst .py files
  python -m lm_from_scratch train --out run --architecture qwen2
      the same with a Qwen2
  python -m lm_from_scratch train --preset docs --out docs-run
      the GPT-2 that ships with this package; docs-qwen2 makes the Qwen2
  python -m lm_from_scratch train --preset tasks --out tasks-run
      a small Qwen2 that adds, sorts, reverses, closes brackets, and finds expressions
  python -m lm_from_scratch train --out run --optimizer galore --rank 16
      Adam's moments in 16 directions of each matrix instead of all
  python -m lm_from_scratch train --out run --optimizer muon
      steps of one size in every direction of a matrix: fewer of them, and each takes longer
  python -m lm_from_scratch train --out run --from path/or/hub-name --corpus my-notes/
      a published model goes on learning, from your text
  python -m lm_from_scratch train --out run --from path/or/hub-name --classify mails.tsv
      the same model learns to label texts; without --from, a new one does
  python -m lm_from_scratch train --out run --from path/or/hub-name --sft chats.jsonl
      it learns to answer, as the chats of the file do
  python -m lm_from_scratch train --out run --from path/or/hub-name --sft chats.jsonl --lora 8
      the same in adapters of a few numbers (LoRA); generate opens run/model, convert --merge
      adds them to the weights
  python -m lm_from_scratch train --out run --from path/or/hub-name --dpo pairs.jsonl
      it learns which of two answers is better
  python -m lm_from_scratch train --out run --from tasks --grpo countdown
      the model of tasks in the package learns from right and wrong answers of its own

several processes: torchrun starts them and stands for python; each takes its rows of every batch,
so that the run is the same. It goes on in any other number of processes, too. When a run ends
early, torchrun prints a traceback of its own below our one line
  torchrun --nproc-per-node 2 -m lm_from_scratch train --out run --parallel ddp
      two processes on one machine, on its processor
  torchrun --nproc-per-node 8 -m lm_from_scratch train --out run --parallel fsdp --device cuda
      one machine with eight GPUs
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
      -m lm_from_scratch train --out /shared/run --parallel fsdp --device cuda
      the same line on each of two machines; HOST is one of them, and both see the folder

how to choose the numbers
  n-embd, n-layer    parameters are about 12 * n-layer * n-embd^2, and the embedding on top
  batch-size * block-size   tokens that one step learns from; larger is smoother and slower
  lr                 the first thing to try to change: halve it if the loss jumps
  rank               of galore: a quarter of n-embd loses little, and less saves more
  galore-scale       its matrices move by lr * scale: at 0.25 they want a larger lr than AdamW
  optim-bits         8 keeps the optimizer's moments in a quarter of the memory, for longer steps
"""

TRAIN = Command(
    "train a new GPT-2 or Qwen2, or a published model, on text",
    (RunOptions, FromFolder, Pretrain, Classify, Sft, Dpo, Grpo, NewModel, StepOptions),
    "lm_from_scratch.commands.train:run",
    description="Train a new GPT-2 or Qwen2, or a published model of any family that can be "
    "opened, on text. The\nrun lives in one folder; the same command, given again after Ctrl-C or "
    "a crash, goes on where the\nrun stopped.",
    examples=f"presets\n{presets_text()}\n\n{EXAMPLES}",
    read=read,
    required=("out",),
)
