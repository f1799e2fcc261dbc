"""``train``: a model on text, in a folder that a later run goes on with."""

import argparse
import contextlib
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from lm_from_scratch.checkpoint.folders import read_json, write_json
from lm_from_scratch.checkpoint.weights import load_checkpoint, save_pretrained
from lm_from_scratch.commands.answers import (
    NUMBERS,
    check_answers,
    instructions,
    preferences,
    rewards,
)
from lm_from_scratch.commands.options import (
    KERNELS_HELP,
    add_fields,
    device_named,
    given,
    new_folder,
    not_empty,
    option,
    positive,
)
from lm_from_scratch.commands.prepared import (
    SIZES,
    Prepared,
    classification,
    config_in,
    continuation,
    refuse_sizes,
    source_of,
)
from lm_from_scratch.commands.presets import OF_PRESET, OF_PRESETS, PRESETS, presets_text
from lm_from_scratch.commands.speed import add_products_options, choose_products, possible_ways
from lm_from_scratch.instruments.onednn import onednn_matmul, use_onednn_
from lm_from_scratch.models.gpt2 import GPT2Config
from lm_from_scratch.models.qwen2 import Qwen2Config
from lm_from_scratch.optim.choose import GALORE, state_bytes
from lm_from_scratch.optim.galore import MOMENTS, GaLore
from lm_from_scratch.optim.galore_basis import BASES, PROJECTION_TYPES
from lm_from_scratch.program import PROGRAM
from lm_from_scratch.runs.config import TrainConfig, train
from lm_from_scratch.runs.distributed import (
    PARALLEL,
    Processes,
    ProcessLost,
    processes,
    watching_signals,
)
from lm_from_scratch.runs.folder import cut_log, follow, how_to_go_on, only_run_in
from lm_from_scratch.runs.saved import saved
from lm_from_scratch.text.corpora import CORPORA
from lm_from_scratch.text.tasks import TASKS

#: How a model learns, by the option that says so.
WAYS = {"classify": classification, "sft": instructions, "dpo": preferences, "grpo": rewards}


def run(args: argparse.Namespace) -> int:
    """Prepare the data, then train until the end or Ctrl-C."""
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; it must be a folder")
    new_folder(args.out, vars(args).get("from"))
    refuse_sizes(args)
    check_answers(args)
    way = next((name for name in NUMBERS if name in args), None)
    args.preset = args.preset or way or ("finetune" if "from" in args else "nano")
    preset = PRESETS[args.preset]
    if "from" in args:
        preset = {name: value for name, value in preset.items() if name not in SIZES}
    steps = getattr(args, "steps", preset["steps"])
    if preset["warmup"] >= steps:  # of a run that was made shorter
        preset = {**preset, "warmup": steps // 10}
    args = argparse.Namespace(**{"dtype": "float32", **preset, **vars(args)})
    if getattr(args, "optimizer", None) == "galore":
        source = source_of(args)
        n_embd = config_in(source).n_embd if source else args.n_embd
        args.rank = getattr(args, "rank", max(1, n_embd // 4))
    args.device = device_named(args.device)
    free = ("run", "out", "quiet", "device", "parallel")
    arguments = {k: v for k, v in vars(args).items() if k not in free}
    try:
        with processes(args.parallel, args.device) as group:
            args.device = group.device
            with only_run_in(out) if group.rank == 0 else silence():
                recipe = out / "recipe.json"
                begun = {}
                if recipe.is_file():
                    begun = read_json(recipe).get("arguments", {})
                    refuse_other_recipe(out, begun, arguments)
                return train_in(out, args, arguments, begun, group)
    except ProcessLost as lost:
        print(f"error: {lost}; {how_to_go_on(out)}", file=sys.stderr)
        return 2
    except BrokenPipeError as error:
        raise ValueError(f"the output was closed; {how_to_go_on(out)}") from error


@contextmanager
def silence() -> Iterator[None]:
    """Print nothing: of several processes, one speaks."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def refuse_other_recipe(out: Path, begun: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Refuse to go on with a run under other numbers, before any of its files is touched."""
    free = {"preset", "checkpoint_every", "eval_every"}  # they do not change the weights
    free |= {name for name in ("dtype", "library") if arguments[name] == "auto"}
    for name in sorted({*begun, *arguments} - free):
        if begun.get(name) != arguments.get(name):
            longer = f", or train its model further with --from {out / 'model'} and another --out"
            further = longer if name == "steps" and (out / "model").is_dir() else ""
            raise ValueError(
                f"{out} holds a run with {option(name)} {begun.get(name)}, not "
                f"{arguments.get(name)}: give the same numbers to go on, or another --out{further}"
            )


def way_of(args: argparse.Namespace) -> Callable[[Path, argparse.Namespace, Processes], Prepared]:
    """What prepares the run: how the model is to learn."""
    return next((way for name, way in WAYS.items() if name in args), continuation)


def train_config_of(args: argparse.Namespace) -> TrainConfig:
    """The numbers of the run."""
    numbers = given(args, TrainConfig)
    if args.dtype == "auto":
        del numbers["dtype"]  # is chosen later
    if args.update_in_backward:
        numbers["max_grad_norm"] = math.inf
    if "grpo" in args:
        numbers["eval_every"] = 0  # every step says the reward
    config = TrainConfig(**numbers)
    if args.checkpoint_every < 0:
        raise ValueError(f"--checkpoint-every {args.checkpoint_every} must not be negative")
    for name, optimizer in {**dict.fromkeys(GALORE, "galore"), "muon_scale": "muon"}.items():
        if name in numbers and config.optimizer != optimizer:
            raise ValueError(f"{option(name)} {numbers[name]} is for --optimizer {optimizer}")
    possible_ways(args)
    if args.kernels and (dropout := gpt2_dropout(args)):
        raise ValueError(
            f"--kernels have no attention dropout, but --dropout {dropout}: give --dropout 0"
        )
    if args.kernels and args.parallel:
        raise ValueError("--kernels and --parallel do not work together: give one of them")
    return config


def gpt2_dropout(args: argparse.Namespace) -> float:
    """The dropout of a GPT-2, which may come from a folder; 0 for a Qwen2, whose is outside."""
    source = source_of(args)
    if source is None:
        return args.dropout if args.architecture == "gpt2" else 0.0
    config = config_in(source)
    if not isinstance(config, GPT2Config):
        return 0.0
    return getattr(args, "dropout", max(config.attn_pdrop, config.resid_pdrop))


def train_in(
    out: Path,
    args: argparse.Namespace,
    arguments: dict[str, Any],
    begun: dict[str, Any],
    group: Processes,
) -> int:
    """The run itself, in a folder that is its own, perhaps one that has ``begun``."""
    config = train_config_of(args)
    group.check(args.batch_size, config.update_in_backward)
    ready = way_of(args)(out, args, group)
    model, batches = ready.model, ready.batches
    print(
        f"{ready.said}; {sum(p.numel() for p in model.parameters())} parameters; "
        f"{batches.batches_per_epoch} batches an epoch"
    )
    if config.optimizer != "adamw" or config.optim_bits != 32:
        adamw = replace(config, optimizer="adamw", optim_bits=32)
        kept, whole = (state_bytes(model, c) / 1e6 for c in (config, adamw))
        print(f"the optimizer keeps {kept:.1f} MB, AdamW in 32 bits would keep {whole:.1f} MB")
    if group.parallel:
        print(
            f"{group.size} processes, {args.batch_size // group.size} rows each: {group.parallel}"
        )
    dtype, library = choose_products(model, args, begun, group)
    config = replace(config, dtype=dtype)
    if library == "onednn":
        use_onednn_(model)
    run = train(model, batches, config, ready.held_out, group, ready.loss)
    if library == "onednn" and isinstance(run.optimizer, GaLore):
        run.optimizer.matmul = onednn_matmul
    save = partial(group.save_training_state, published=ready.published)
    steps = saved(run, out, args.checkpoint_every, save)
    if group.rank == 0:
        sizes = asdict(model.backbone.config)
        arguments = {**arguments, "dtype": dtype, "library": library}
        ready.tokenizer.save(out)
        record = {"text": batches.recipe()["text"], "arguments": arguments, "model": sizes}
        write_json(out / "recipe.json", record)
    if done := run.step:
        print(f"going on after step {done}")
    log = out / "log.jsonl" if group.rank == 0 else Path(os.devnull)
    if group.rank == 0:
        cut_log(log, done)

    def say() -> None:
        if group.first_to_say():
            print(f"error: another process does not answer; {how_to_go_on(out)}", file=sys.stderr)

    with watching_signals(say) if group.parallel else contextlib.nullcontext():
        stop = follow(steps, log, config.steps, done, args.quiet, group)
    if stop is not None:
        print(f"stopped after step {stop.step}; the same command goes on from there")
        return 128 + stop.signal
    if group.rank == 0:
        trained = load_checkpoint(out / f"step-{config.steps:08}").model
        if ready.result:
            print(ready.result(trained))
        save_pretrained(trained, out / "model", ready.tokenizer, published=ready.published)
    print(f"model written to {out / 'model'}")
    model_folder = shlex.quote(str(out / "model"))
    command = "classify" if "classify" in args else "generate"
    print(f"try: {PROGRAM} {command} --model {model_folder} {ready.ask}")
    return 0


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
      a published GPT-2 or Qwen2 goes on learning, from your text
  python -m lm_from_scratch train --out run --from path/or/hub-name --classify mails.tsv
      the same model learns to label texts; without --from, a new one does
  python -m lm_from_scratch train --out run --from path/or/hub-name --sft chats.jsonl
      it learns to answer, as the chats of the file do
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


def add_options(p: argparse.ArgumentParser) -> None:
    """All that a run can be told, with the presets, examples and advice below."""
    p.description = (
        "Train a GPT-2 or a Qwen2 on text. The run lives in one folder; the same command, given "
        "again after\nCtrl-C or a crash, goes on where the run stopped."
    )
    p.epilog = f"presets\n{presets_text()}\n\n{EXAMPLES}"
    p.add_argument("--preset", choices=PRESETS, help="default: nano; with --from: finetune")
    p.add_argument("--out", type=not_empty, required=True, help="folder of the run")
    p.add_argument(
        "--corpus", nargs="+", type=not_empty, metavar="TEXT", default=OF_PRESET,
        help=f"{', '.join(CORPORA)}, or a file or folder of text, of which whole files are held "
        "out, and pieces of a large one; NAME*3 repeats it three times",
    )  # fmt: skip
    p.add_argument(
        "--from", type=not_empty, metavar="FOLDER", default=argparse.SUPPRESS,
        help="begin with this GPT-2 or Qwen2 and its tokenizer: a folder, or a name on the hub",
    )  # fmt: skip
    p.add_argument(
        "--classify", type=not_empty, metavar="FILE", default=argparse.SUPPRESS,
        help="learn to label texts: a file of lines TEXT<tab>LABEL (a first line that says label "
        "is left out), or of objects with text and label (.jsonl)",
    )  # fmt: skip
    add_answer_options(p)
    p.add_argument(
        "--tokenizer", type=not_empty, help="a tokenizer.json to use instead of training one"
    )
    p.add_argument(
        "--chat-tokens", action="store_true", default=OF_PRESET,
        help="a tokenizer that is made here gets the special tokens of a chat and a template",
    )  # fmt: skip
    add_model_options(p)
    add_step_options(p)
    add_run_options(p)


def add_answer_options(p: argparse.ArgumentParser) -> None:
    """Learning after pretraining: what from, and the numbers of each way."""
    after = p.add_argument_group("after pretraining, with --from")
    way = after.add_mutually_exclusive_group()
    suppress = argparse.SUPPRESS
    way.add_argument(
        "--sft", type=not_empty, metavar="FILE", default=suppress,
        help='learn the answers of a .jsonl file: lines {"messages": [...]} of a chat, or '
        '{"prompt": ..., "completion": ...}',
    )  # fmt: skip
    way.add_argument(
        "--dpo", type=not_empty, metavar="FILE", default=suppress,
        help='learn which answer is better: lines {"prompt": ..., "chosen": ..., "rejected": ...}',
    )  # fmt: skip
    way.add_argument(
        "--grpo", type=not_empty, nargs="+", metavar="TASK", default=suppress,
        help=f"learn from rewards for right answers: {', '.join(TASKS)}, or a file as for --sft, "
        "whose answers are the right ones",
    )  # fmt: skip
    after.add_argument(
        "--beta", type=float, default=suppress, help="of --dpo: how near it stays; default: 0.1"
    )
    after.add_argument(
        "--group-size", type=positive, default=suppress,
        help="of --grpo: answers to each question, of --batch-size in all; default: 8",
    )  # fmt: skip
    after.add_argument(
        "--kl", type=float, default=suppress,
        help="of --grpo: how strongly it is held near the model of --from; default: 0",
    )  # fmt: skip
    after.add_argument(
        "--max-new-tokens", type=positive, default=suppress,
        help="of --grpo: the longest answer; default: 32",
    )  # fmt: skip


def add_model_options(p: argparse.ArgumentParser) -> None:
    """What is trained."""
    p.add_argument(
        "--architecture", choices=["gpt2", "qwen2"], default=OF_PRESET, help="default: gpt2"
    )
    sizes = "vocab_size n_layer n_head n_embd intermediate_size initializer_range block_size"
    add_fields(p, GPT2Config, sizes.split(), **OF_PRESETS)
    add_fields(p, Qwen2Config, ["n_kv_head"], n_kv_head="n-head, and only qwen2 has it")
    p.add_argument(
        "--dropout", type=float, default=OF_PRESET, help="share of activations zeroed in training"
    )


def add_step_options(p: argparse.ArgumentParser) -> None:
    """How it is trained: batches, learning rates, the optimizer."""
    p.add_argument(
        "--batch-size", type=int, default=OF_PRESET, help="rows in a batch, over all processes"
    )
    names = "grad_accumulation steps lr min_lr warmup weight_decay chunked_loss optimizer"
    add_fields(p, TrainConfig, [*names.split(), "optim_bits"], **OF_PRESETS)
    words = {"projection_type": PROJECTION_TYPES, "basis": BASES, "moments": MOMENTS}
    add_fields(
        p, TrainConfig, [*GALORE, "muon_scale", "update_in_backward"], words, rank="n-embd / 4"
    )


def add_run_options(p: argparse.ArgumentParser) -> None:
    """How the run goes: engines, checkpoints, devices."""
    add_products_options(p)
    p.add_argument("--kernels", action="store_true", help=KERNELS_HELP)
    add_fields(p, TrainConfig, ["eval_every"], **OF_PRESETS)
    p.add_argument("--checkpoint-every", type=int, default=100, help="default: 100 steps")
    p.add_argument("--held-out", type=float, default=0.05, help="share held out; default: 0.05")
    p.add_argument("--no-isolate", action="store_true", help="let packed documents see each other")
    p.add_argument("--seed", type=int, default=0, help="of weights, data order and dropout")
    p.add_argument("--device", default="cpu", help="cpu or cuda; default: cpu")
    p.add_argument(
        "--parallel",
        choices=PARALLEL,
        help="under torchrun: ddp, a model in every process; fsdp, a share of it in each",
    )
    p.add_argument("--quiet", action="store_true", help="no progress bar")
