"""The command line: ``python -m lm_from_scratch train | generate | quantize | check | doctor``."""

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import shutil
import signal
import sys
import textwrap
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lm_from_scratch.checkpoint import (
    from_pretrained,
    latest_checkpoint,
    load_shipped,
    local_folder,
    read_json,
    save_pretrained,
    write_json,
)
from lm_from_scratch.data import (
    CORPORA,
    PackedBatches,
    load_split,
    sequential_batches,
    write_tokens,
)
from lm_from_scratch.distributed import (
    ALONE,
    PARALLEL,
    Processes,
    ProcessLost,
    processes,
    watching_signals,
)
from lm_from_scratch.exercises.commands import add_commands
from lm_from_scratch.generation.beam_search import beam_search
from lm_from_scratch.generation.generate import (
    complete,
    forward_seconds,
    generate,
    generate_text,
    until,
)
from lm_from_scratch.generation.logit_processors import no_repeat_ngram
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.instruments.onednn import bfloat16_is_native, use_onednn_
from lm_from_scratch.models.causal_lm import CausalLM, Config, build
from lm_from_scratch.models.gpt2 import GPT2Config
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.optim.galore import MOMENTS
from lm_from_scratch.optim.galore_basis import BASES, PROJECTION_TYPES
from lm_from_scratch.quantize import WEIGHTS, quantize_, quantized_weights
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.train import (
    GALORE,
    Step,
    TrainConfig,
    check_shared,
    residual_dropout_,
    state_numbers,
    train,
)

KERNELS_HELP = "compute with Triton kernels, on a CUDA device"

#: Every preset is a set of defaults; any of its numbers can be changed on the command line.
PRESETS: dict[str, dict[str, Any]] = {
    "nano": dict(  # half a minute on a laptop: to see that it learns
        architecture="gpt2", corpus=["reference"], vocab_size=1024,
        n_layer=2, n_head=4, n_embd=64, block_size=64, dropout=0.0,
        batch_size=32, steps=300, lr=3e-3, min_lr=3e-4, warmup=50, eval_every=100,
    ),
    "docs": dict(  # the GPT-2 that ships with the package: about an hour on one core
        architecture="gpt2", corpus=["reference*2", "docstrings"], vocab_size=4096,
        n_layer=8, n_head=4, n_embd=128, block_size=256, dropout=0.1,
        batch_size=16, steps=3000, lr=2e-3, min_lr=1e-4, warmup=200, eval_every=200,
        dtype="bfloat16",
    ),
}  # fmt: skip

#: The Qwen2 that ships with the package: as many weights, and all else as for the GPT-2.
PRESETS["docs-qwen2"] = {
    **PRESETS["docs"], "architecture": "qwen2", "n_kv_head": 2, "intermediate_size": 384,
}  # fmt: skip


def train_command(args: argparse.Namespace) -> int:
    """Prepare the data, then train until the end or Ctrl-C."""
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; it must be a folder")
    args.device = device_named(args.device)
    free = ("run", "out", "quiet", "device", "parallel")
    arguments = {k: v for k, v in vars(args).items() if k not in free}
    try:
        with processes(getattr(args, "parallel", None), args.device) as group:
            args.device = group.device
            with only_run_in(out) if group.rank == 0 else silence():
                recipe = out / "recipe.json"
                if recipe.is_file():
                    refuse_other_recipe(recipe, arguments)
                return train_in(out, args, arguments, group)
    except ProcessLost as lost:
        raise ProcessLost(f"{lost}; {how_to_go_on(out)}") from lost


def how_to_go_on(out: Path) -> str:
    """What is left of a run that ended too early."""
    found = latest_checkpoint(out)
    last = f"the last checkpoint is {found}" if found else "there is no checkpoint yet"
    return f"{last}. The same command goes on from there"


@contextmanager
def silence() -> Iterator[None]:
    """Print nothing: of several processes, one speaks."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


@contextmanager
def only_run_in(out: Path) -> Iterator[None]:
    """Hold the folder's lock; a second run in the same folder would destroy the first."""
    out.mkdir(parents=True, exist_ok=True)
    lock = out / ".lock"
    with open(lock, "w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # Windows: no lock
        except OSError as error:
            raise ValueError(f"another run is using {out}") from error
        try:
            yield
        finally:
            if [*out.iterdir()] == [lock]:  # a run that was refused leaves nothing behind
                lock.unlink()
                out.rmdir()


def refuse_other_recipe(path: Path, arguments: dict[str, Any]) -> None:
    """Refuse to go on with a run under other numbers, before any of its files is touched."""
    free = {"preset", "checkpoint_every", "eval_every"}  # they do not change the weights
    stored = read_json(path).get("arguments", {})
    for name in sorted({*stored, *arguments} - free):
        if stored.get(name) != arguments.get(name):
            raise ValueError(
                f"{path.parent} holds a run with {option(name)} {stored.get(name)}, not "
                f"{arguments.get(name)}: give the same numbers to go on, or another --out"
            )


def dtype_here(dtype: str, device: str) -> str:
    """A preset's ``dtype``, or float32 on a processor where bfloat16 would only be slower."""
    slow = dtype == "bfloat16" and device.startswith("cpu") and not bfloat16_is_native()
    return "float32" if slow else dtype


def option(name: str) -> str:
    """How the command line calls a value."""
    return "--galore-scale" if name == "scale" else "--" + name.replace("_", "-")


def device_named(name: str) -> str:
    """``name`` if torch has such a device here."""
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name} cannot be used here: {reason}") from error
    return name


def use_kernels(model: CausalLM) -> None:
    """Make the model compute with Triton kernels, or say why it cannot."""
    try:
        from lm_from_scratch.kernels.model import use_kernels_
    except ImportError as error:
        raise ValueError(
            f"--kernels need Triton (pip install triton, on Linux): {error}"
        ) from error
    use_kernels_(model)


def train_config_of(args: argparse.Namespace) -> TrainConfig:
    """The numbers of the run. Raises ``ValueError`` for options that exclude each other."""
    names = {field.name for field in fields(TrainConfig)}
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if args.update_in_backward:
        given["max_grad_norm"] = math.inf
    config = TrainConfig(**given)
    for name in GALORE:
        if name in given and config.optimizer != "galore":
            raise ValueError(f"{option(name)} {given[name]} is for --optimizer galore")
    if args.onednn and config.dtype != "float32":
        raise ValueError(f"--onednn is for --dtype float32, not {config.dtype}")
    if args.onednn and torch.device(args.device).type != "cpu":
        raise ValueError(f"--onednn is for --device cpu, not {args.device}")
    if args.kernels and args.dropout and args.architecture == "gpt2":
        raise ValueError(
            f"--kernels have no attention dropout, but --dropout {args.dropout}: give --dropout 0"
        )
    for other in ("onednn", "parallel"):
        if args.kernels and getattr(args, other, None):
            raise ValueError(f"--kernels and --{other} do not work together: give one of them")
    return config


def model_of(config: Config, args: argparse.Namespace, group: Processes) -> CausalLM:
    """A new model, with all that the options put into it."""
    torch.manual_seed(args.seed)
    model = build(config)
    if group.parallel is None:  # otherwise each process takes its share there
        model.to(args.device)
    if isinstance(model, Qwen2ForCausalLM):
        residual_dropout_(model, args.dropout)
    if args.onednn:
        use_onednn_(model)
    if args.kernels:
        use_kernels(model)
    return model


def train_in(
    out: Path, args: argparse.Namespace, arguments: dict[str, Any], group: Processes
) -> int:
    """The run itself, in a folder that is its own."""
    config = train_config_of(args)
    check_shared(config, args.batch_size, group)
    train_documents, held_out_documents = load_split(args.corpus, args.held_out)
    isolate = not args.no_isolate
    with group.first_alone():
        if (out / "recipe.json").is_file() or group.rank > 0:  # the run goes on
            tokenizer = Tokenizer.load(out)
        elif args.tokenizer:
            tokenizer = Tokenizer.load(args.tokenizer)
        else:
            tokenizer = Tokenizer.train([d.text for d in train_documents], args.vocab_size)
        model = model_of(model_config_of(args, tokenizer), args, group)
        if group.rank == 0:
            tokenizer.save(out)
        train_file = write_tokens(train_documents, tokenizer, out / "data" / "train.bin")
        held_out_file = write_tokens(held_out_documents, tokenizer, out / "data" / "held_out.bin")
    batches = PackedBatches(train_file, args.batch_size, args.block_size, args.seed, isolate)
    held_out = list(sequential_batches(held_out_file, args.batch_size, args.block_size, isolate))
    print(
        f"{len(train_documents)} documents, {train_file.n_tokens} tokens for training, "
        f"{held_out_file.n_tokens} held out; {sum(p.numel() for p in model.parameters())} "
        f"parameters; {batches.batches_per_epoch} batches an epoch"
    )
    if config.optimizer == "galore":
        numbers = state_numbers(model, config)
        adamw = state_numbers(model, replace(config, optimizer="adamw"))
        print(f"GaLore keeps {numbers} numbers, AdamW would keep {adamw}")
    if group.parallel:
        print(
            f"{group.size} processes, {args.batch_size // group.size} rows each: {group.parallel}"
        )
    steps = train(model, batches, config, held_out, out, group)
    if group.rank == 0:
        write_json(out / "recipe.json", {"arguments": arguments, "model": asdict(model.config)})
    done = int(found.name.removeprefix("step-")) if (found := latest_checkpoint(out)) else 0
    if done:
        print(f"going on after step {done}")
    log = out / "log.jsonl" if group.rank == 0 else Path(os.devnull)
    if group.rank == 0:
        cut_log(log, done)

    def say() -> None:
        if group.first_to_say():
            print(f"error: another process does not answer; {how_to_go_on(out)}", file=sys.stderr)

    with watching_signals(say) if group.parallel else contextlib.nullcontext():
        stopped_after = follow(steps, log, config.steps, done, args.quiet, group)
    if stopped_after is not None:
        print(f"stopped after step {stopped_after}; the same command goes on from there")
        return 130
    if group.rank == 0:
        save_pretrained(from_pretrained(out / f"step-{config.steps:08}"), out / "model", tokenizer)
    print(f"model written to {out / 'model'}")
    model_folder = shlex.quote(str(out / "model"))
    print(f"try: python -m lm_from_scratch generate --model {model_folder} --prompt The")
    return 0


def model_config_of(args: argparse.Namespace, tokenizer: Tokenizer) -> Config:
    """The model that the options describe."""
    sizes: dict[str, Any] = dict(
        vocab_size=tokenizer.vocab_size,
        block_size=args.block_size,
        n_layer=args.n_layer,
        n_head=args.n_head,
        n_embd=args.n_embd,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    if hasattr(args, "intermediate_size"):
        sizes["intermediate_size"] = args.intermediate_size
    if args.architecture == "qwen2":
        sizes.setdefault("intermediate_size", 3 * args.n_embd)
        n_kv_head = getattr(args, "n_kv_head", args.n_head)
        return Qwen2Config(n_kv_head=n_kv_head, rope_theta=10000.0, **sizes)
    if hasattr(args, "n_kv_head"):
        raise ValueError(
            f"--n-kv-head {args.n_kv_head} (given, or of the preset) is for --architecture qwen2"
        )
    dropout = args.dropout
    return GPT2Config(embd_pdrop=dropout, resid_pdrop=dropout, attn_pdrop=0.0, **sizes)


def follow(
    steps: Generator[Step, None, None],
    log: Path,
    total: int,
    done: int,
    quiet: bool,
    group: Processes = ALONE,
) -> int | None:
    """Log and show the steps of a run. Returns the step after which Ctrl-C (or SIGTERM) ended it,
    if it did."""
    stop: list[int] = []  # a signal ends the run between two steps, never inside one
    signals = (signal.SIGINT, signal.SIGTERM)
    previous = {s: signal.signal(s, lambda number, frame: stop.append(number)) for s in signals}
    try:
        with (
            open(log, "a") as file,
            tqdm(total=total, initial=done, unit="step", disable=quiet or group.rank > 0) as bar,
        ):
            for step in steps:
                numbers = {k: None if v != v else v for k, v in asdict(step).items()}  # NaN
                file.write(json.dumps(numbers) + "\n")
                file.flush()
                bar.update()
                bar.set_postfix_str(
                    f"loss {step.loss:.3f}, lr {step.lr:.1e}, {step.tokens_per_second:.0f} tokens/s"
                )
                if step.held_out_loss is not None:
                    bar.write(f"step {step.step}: held-out loss {step.held_out_loss:.4f}")
                (stops,) = group.total(len(stop))  # all processes stop after the same step
                if stops and step.step < total:
                    steps.close()  # writes a checkpoint
                    return step.step
    except RuntimeError:  # a process was lost: torchrun ends this one too, which has a word to say
        if group.parallel:
            previous[signal.SIGTERM] = signal.SIG_IGN
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return None


def cut_log(log: Path, done: int) -> None:
    """Keep the lines up to step ``done``: a killed run may have written past its checkpoint."""
    if log.is_file():
        kept = [line for line in log.read_text().splitlines() if 0 < logged_step(line) <= done]
        temporary = log.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept))
        os.replace(temporary, log)


def logged_step(line: str) -> int:
    """The step of a line of the log; 0 if the line was cut off."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0


def generate_command(args: argparse.Namespace) -> int:
    """Load a model and print what it says, as it says it."""
    folder = local_folder(args.model)
    model = from_pretrained(folder).to(device_named(args.device))
    if not quantized_weights(model):  # whose kernels want the dtype of the file
        model.float()
    if args.kernels:
        use_kernels(model)
    tokenizer = tokenizer_of(folder)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, the model "
            f"{model.config.vocab_size}: they do not belong together"
        )
    sampler = Sampler(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        typical_p=args.typical_p,
        repetition_penalty=args.repetition_penalty,
    )
    rules = [no_repeat_ngram(args.no_repeat_ngram)] if args.no_repeat_ngram else []
    end = tokenizer.eos_token_id
    prompt = [end, *tokenizer.encode(args.prompt)]
    room = model.config.block_size - len(prompt) + 1  # what it was trained for
    max_new_tokens = args.max_new_tokens or max(1, min(100, room))
    if args.num_beams:
        if args.stop:
            raise ValueError(
                f"--stop {args.stop[0]!r} is not for --num-beams, which ranks whole texts"
            )
        found = beam_search(
            model, [prompt], max_new_tokens, args.num_beams, args.length_penalty,
            num_return_sequences=args.num_return_sequences, stop_tokens=[end], processors=rules,
        )[0]  # fmt: skip
        for number, hypothesis in enumerate(found, start=1):
            text = tokenizer.decode([token for token in hypothesis.tokens if token != end])
            print(f"--- {number}, score {hypothesis.score:.3f}\n{args.prompt}{text}")
        return 0
    if args.num_return_sequences == 1:
        pieces = generate_text(
            model, tokenizer, args.prompt, max_new_tokens, sampler, args.seed, args.stop, rules
        )
        print(args.prompt, end="", flush=True)
        for text in pieces:
            print(text, end="", flush=True)
        print()
        return 0
    steps = generate(
        model, [prompt], max_new_tokens, sampler, [end], args.num_return_sequences, args.seed,
        processors=rules,
    )  # fmt: skip
    for number, row in enumerate(complete(steps), start=1):
        text = tokenizer.decode([token for token in row if token != end])
        text = "".join(until([text], args.stop))
        print(f"--- {number}\n{args.prompt}{text}")
    return 0


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a model, which a run keeps beside its checkpoints."""
    for place in (folder, folder.parent):
        if (place / "tokenizer.json").is_file():
            return Tokenizer.load(place)
    raise ValueError(
        f"{folder} has no tokenizer.json: save_pretrained(model, folder, tokenizer) writes one"
    )


def quantize_command(args: argparse.Namespace) -> int:
    """Write a model with weights of 8 or 4 bits to a folder of its own."""
    folder, out = local_folder(args.model), Path(args.out)
    if out.resolve() == folder.resolve():
        raise ValueError(f"--out {out} is the model itself; give another folder")
    model, tokenizer = from_pretrained(folder), tokenizer_of(folder)
    before = sum(p.nbytes for p in model.parameters())
    was = str(model.head_weight.dtype).removeprefix("torch.")
    quantize_(model.to(getattr(torch, args.dtype)), args.bits, args.group_size)
    save_pretrained(model, out, tokenizer)
    after = sum(p.nbytes for p in model.parameters())
    print(f"{before} bytes of weights before, in {was}; {after} after: {after / before:.0%}")
    print(f"model written to {out}")
    print(f"try: python -m lm_from_scratch generate --model {shlex.quote(str(out))} --prompt The")
    return 0


def doctor_command(args: argparse.Namespace) -> int:
    """Print what was found, and for each thing that is missing what to do about it."""
    problems = 0

    def report(ok: bool, what: str, fix: str = "") -> None:
        nonlocal problems
        problems += not ok
        print(f"{'ok  ' if ok else 'MEND'}  {what}" + (f"\n      -> {fix}" if not ok else ""))

    def note(what: str) -> None:
        print(f"note  {what}")

    version = platform.python_version()
    report(
        sys.version_info >= (3, 11),
        f"Python {version} on {platform.system()} {platform.machine()}",
        "install Python 3.11 or newer and make the environment again",
    )
    in_clone = (Path(__file__).resolve().parents[1] / "pyproject.toml").is_file()
    if not in_clone:
        note("the package alone; the pages, the site and the tests are in the repository")
    for package, why, extra in (
        ("torch", "everything", ""),
        ("tokenizers", "text to tokens", ""),
        ("safetensors", "weights on disk", ""),
        ("matplotlib", "figures", ""),
        ("jupyterlab", "notebooks (make lab)", "lab"),
        ("sphinx-gallery", "the site (make docs)", "docs"),
        ("nbval", "the notebook tests (make test)", "test"),
        ("transformers", "comparisons in tests and pages", "test"),
    ):
        try:
            report(True, f"{package} {importlib.metadata.version(package)}: {why}")
        except importlib.metadata.PackageNotFoundError:
            if not in_clone and extra:  # what these are for is in the repository alone
                continue
            target = f'".[{extra}]"' if extra else "."
            command = f"pip install -c constraints.txt -e {target}"
            report(False, f"{package} is missing: {why}", command)
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    report(release >= (2, 13), f"torch {torch.__version__} is 2.13 or newer", "make clean test")
    note(f"{os.cpu_count()} CPU cores, torch uses {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        note(f"GPU: {torch.cuda.get_device_name()}; use --device cuda")
    else:
        note("no CUDA GPU: every page runs on the CPU")
    try:
        triton = f"triton {importlib.metadata.version('triton')}: kernels "
        on_gpu = torch.cuda.is_available()
        note(triton + ("run (--kernels)" if on_gpu else "are interpreted by tests and notebooks"))
    except importlib.metadata.PackageNotFoundError:
        note("no triton, which exists for Linux: everything but the kernels works")
    a = torch.randn(64, 64)
    error = (a.bfloat16() @ a.bfloat16() - a @ a).abs().max().item()
    slower = "" if bfloat16_is_native() else ", slower than float32 on this processor"
    report(math.isfinite(error), f"bfloat16 matrix products work (--dtype bfloat16){slower}")
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    report(free > 3, f"{free:.0f} GiB free here", "the environment and the site need about 3 GiB")
    report(
        os.access(Path.cwd(), os.W_OK), f"{Path.cwd()} can be written", "change to another folder"
    )
    try:
        for name in ("qwen2-docs", "gpt2-docs"):
            model, tokenizer = load_shipped(name)
            text = "".join(generate_text(model, tokenizer, "Return the", 8))
            report(bool(text), f"{name} says: Return the{text!r}")
        total = sum(p.numel() for p in model.parameters())
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        note(f"it has {total} parameters, {trainable} of them trainable")
        idx, threads = torch.zeros(1, 10, dtype=torch.long), torch.get_num_threads()
        milliseconds = {}
        for n in {threads, 1}:
            torch.set_num_threads(n)
            milliseconds[n] = 1000 * forward_seconds(model, idx, repeats=9)
        torch.set_num_threads(threads)
        note(f"it reads 10 tokens in {milliseconds[threads]:.1f} ms with {threads} thread(s)")
        if milliseconds[threads] > 1.1 * milliseconds[1]:
            note(f"1 thread is faster, {milliseconds[1]:.1f} ms: export OMP_NUM_THREADS=1")
        elif threads > 1:
            report(True, f"more threads do not slow it down (1 thread: {milliseconds[1]:.1f} ms)")
    except ValueError as error_text:
        report(False, f"the shipped models: {error_text}", "install the package again")
    print("\nall well" if not problems else f"\n{problems} to mend")
    return 1 if problems else 0


def positive(text: str) -> int:
    """An option's value that must be a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def add_train(commands: Any, keep: Any) -> None:
    """The command that trains, with its presets and examples."""
    presets = "\n".join(
        textwrap.fill(
            ", ".join(
                f"{option.replace('_', '-')}={','.join(value) if type(value) is list else value}"
                for option, value in values.items()
            ),
            width=88,
            initial_indent=f"  {name:10} ",
            subsequent_indent=" " * 13,
            break_on_hyphens=False,
        )
        for name, values in PRESETS.items()
    )
    p = commands.add_parser(
        "train",
        help="train a GPT-2 or a Qwen2 on text",
        formatter_class=keep,
        description="Train a GPT-2 or a Qwen2 on text. The run lives in one folder; the same "
        "command, given again after\nCtrl-C or a crash, goes on where the run stopped.",
        epilog=f"""presets
{presets}

examples
  python -m lm_from_scratch train --out run
      a nano model on Python's language reference, in half a minute
  python -m lm_from_scratch train --out run --corpus my-notes/ --steps 2000 --n-embd 128
      your own text: a file, or a folder of .txt .md .rst .py files
  python -m lm_from_scratch train --out run --architecture qwen2
      the same with a Qwen2
  python -m lm_from_scratch train --preset docs --out docs-run
      the GPT-2 that ships with this package; docs-qwen2 makes the Qwen2
  python -m lm_from_scratch train --out run --optimizer galore --rank 16
      Adam's moments in 16 directions of each matrix instead of all

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
""",
    )
    p.set_defaults(run=train_command)
    p.add_argument("--preset", choices=PRESETS, default="nano", help="default: nano")
    p.add_argument("--out", required=True, help="folder of the run")
    p.add_argument(
        "--corpus", nargs="+", metavar="TEXT",
        help=f"{', '.join(CORPORA)}, or a path; NAME*3 repeats it three times",
    )  # fmt: skip
    p.add_argument("--tokenizer", help="a tokenizer.json to use instead of training one")
    p.add_argument("--vocab-size", type=int, help="tokens in the vocabulary")
    add_model_options(p)
    add_step_options(p)
    add_run_options(p)


def add_model_options(p: argparse.ArgumentParser) -> None:
    """What is trained."""
    p.add_argument("--architecture", choices=["gpt2", "qwen2"], help="default: gpt2")
    p.add_argument("--n-layer", type=int, help="blocks")
    p.add_argument("--n-head", type=int, help="attention heads in each block")
    p.add_argument("--n-kv-head", type=int, help="qwen2: heads that keys and values have")
    p.add_argument("--n-embd", type=int, help="features of a token; a multiple of n-head")
    p.add_argument("--intermediate-size", type=int, help="width of the MLP")
    p.add_argument("--block-size", type=int, help="the longest sequence, in tokens")
    p.add_argument("--dropout", type=float, help="share of activations zeroed in training")


def add_step_options(p: argparse.ArgumentParser) -> None:
    """How it is trained: batches, learning rates, the optimizer."""
    p.add_argument("--batch-size", type=int, help="rows in a batch, over all processes")
    p.add_argument("--grad-accumulation", type=int, help="batches summed up before each step")
    p.add_argument("--steps", type=int, help="length of the run and of its schedule")
    p.add_argument("--lr", type=float, help="highest learning rate")
    p.add_argument("--min-lr", type=float, help="learning rate of the last step")
    p.add_argument("--optimizer", choices=["adamw", "galore"], help="default: adamw")
    p.add_argument("--rank", type=int, help="galore: directions of each matrix; default n-embd / 4")
    p.add_argument("--update-proj-gap", type=int, help="galore: steps for one basis; default 200")
    p.add_argument(
        "--galore-scale",
        dest="scale",
        type=float,
        help="galore: factor of the matrices' steps, so lr * scale is their rate; default 0.25",
    )
    p.add_argument("--projection-type", choices=PROJECTION_TYPES, help="galore: default std")
    p.add_argument("--basis", choices=BASES, help="galore: how it is found; default gram")
    p.add_argument(
        "--moments", choices=MOMENTS, help="galore: what a new basis does to them; default keep"
    )
    p.add_argument(
        "--update-in-backward",
        action="store_true",
        help="update each weight as soon as its gradient is there: less memory, no clipping",
    )


def add_run_options(p: argparse.ArgumentParser) -> None:
    """How the run goes: precision, checkpoints, devices."""
    p.add_argument("--warmup", type=int, help="steps until the highest learning rate")
    p.add_argument("--weight-decay", type=float, help="shrinks matrices, not biases and norms")
    p.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of the matrix products; a preset takes bfloat16 where the processor has it",
    )
    p.add_argument(
        "--onednn", action="store_true", help="float32 products by oneDNN: faster on AMD processors"
    )
    p.add_argument("--kernels", action="store_true", help=KERNELS_HELP)
    p.add_argument(
        "--chunked-loss",
        action="store_true",
        help="a step never holds its logits: for large vocabularies",
    )
    p.add_argument("--eval-every", type=int, help="steps between held-out losses; 0 is never")
    p.add_argument("--checkpoint-every", type=int, default=100, help="default: 100 steps")
    p.add_argument("--held-out", type=float, default=0.05, help="share held out; default 0.05")
    p.add_argument("--no-isolate", action="store_true", help="let packed documents see each other")
    p.add_argument("--seed", type=int, default=0, help="of weights, data order and dropout")
    p.add_argument("--device", default="cpu", help="cpu or cuda; default cpu")
    p.add_argument(
        "--parallel",
        choices=PARALLEL,
        help="under torchrun: ddp, a model in every process; fsdp, a share of it in each",
    )
    p.add_argument("--quiet", action="store_true", help="no progress bar")


def add_generate(commands: Any, keep: Any) -> None:
    """The command that lets a model speak, with examples."""
    p = commands.add_parser(
        "generate",
        help="let a model continue a text",
        formatter_class=keep,
        description="Let a model continue a text.",
        epilog="""examples
  python -m lm_from_scratch generate --prompt "Return the number of"
  python -m lm_from_scratch generate --prompt "json.dumps(obj)" --temperature 0
  python -m lm_from_scratch generate --model qwen2-docs --prompt "class Stack:"
  python -m lm_from_scratch generate --prompt "The" --num-beams 4 --no-repeat-ngram 3
  python -m lm_from_scratch generate --prompt "The" --stop $'\\n\\n' "Note:"
  python -m lm_from_scratch generate --model path/or/hub-name --prompt "Hello" --top-p 0.9

how to choose
  temperature   0 always takes the likeliest token; 1 draws from the model's own distribution
  top-k, top-p  cut the tail of unlikely tokens off: by number, by probability
  num-beams     the likeliest text instead of a drawn one: short, safe, often repetitive
  min-p         cut off what is less likely than this share of the likeliest token
  typical-p     keep the tokens whose surprise is nearest to the mean
""",
    )
    p.set_defaults(run=generate_command)
    p.add_argument(
        "--model",
        default="gpt2-docs",
        help="gpt2-docs or qwen2-docs, which come with the package (default: gpt2-docs), "
        "or a folder, or a name on the hub",
    )
    p.add_argument("--prompt", default="", help="text to continue; default: a new document")
    p.add_argument("--max-new-tokens", type=positive, help="default: 100, or what fits the model")
    p.add_argument("--temperature", type=float, default=0.8, help="default: 0.8")
    p.add_argument("--top-k", type=int, default=0, help="0 is off, the default")
    p.add_argument("--top-p", type=float, default=0.95, help="1 is off; default: 0.95")
    p.add_argument("--min-p", type=float, default=0.0, help="0 is off, the default")
    p.add_argument("--typical-p", type=float, default=1.0, help="1 is off, the default")
    p.add_argument("--no-repeat-ngram", type=int, default=0, help="0 is off, the default")
    p.add_argument("--stop", nargs="+", default=[], metavar="TEXT", help="end before one of these")
    p.add_argument("--repetition-penalty", type=float, default=1.0, help="1 is off, the default")
    p.add_argument("--num-return-sequences", type=int, default=1, help="default: 1")
    p.add_argument(
        "--num-beams",
        type=int,
        default=0,
        help="beam search, which draws nothing, so what bends the draw has no effect; 0 is off",
    )
    p.add_argument("--length-penalty", type=float, default=1.0, help="of beam search; default: 1")
    p.add_argument("--seed", type=int, default=0, help="same seed, same text; default: 0")
    p.add_argument("--device", default="cpu", help="cpu or cuda; default cpu")
    p.add_argument("--kernels", action="store_true", help=KERNELS_HELP)


def add_quantize(commands: Any, keep: Any) -> None:
    """The command that shrinks a model, with examples."""
    p = commands.add_parser(
        "quantize",
        help="write a model with weights of 8 or 4 bits",
        formatter_class=keep,
        description="Write a model with weights of 8 or 4 bits, which generate --model reads.",
        epilog="""examples
  python -m lm_from_scratch quantize gpt2-docs --bits 8 --out build/int8
  python -m lm_from_scratch quantize path/or/hub-name --bits 4 --group-size 32 --out build/int4
""",
    )
    p.set_defaults(run=quantize_command)
    p.add_argument("model", help="gpt2-docs or qwen2-docs, or a folder, or a name on the hub")
    p.add_argument("--out", required=True, help="folder of the new model")
    p.add_argument("--bits", type=int, choices=WEIGHTS, default=8, help="default: 8")
    p.add_argument(
        "--group-size",
        type=positive,
        help="numbers that share a scale; default: a row with 8 bits, 64 with 4",
    )
    p.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        default="bfloat16",
        help="of scales, of all other weights and of products; default: bfloat16, which is fastest",
    )


def parser() -> argparse.ArgumentParser:
    """The argument parser, with an epilogue of examples for every command."""
    keep = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="python -m lm_from_scratch",
        description="Train a small language model, let one speak, shrink one, and check what runs "
        "here.",
    )
    commands = top.add_subparsers(required=True, metavar="command")
    add_train(commands, keep)
    add_generate(commands, keep)
    add_quantize(commands, keep)
    add_commands(commands, keep)
    p = commands.add_parser("doctor", help="what runs here, and how to fix what does not")
    p.set_defaults(run=doctor_command)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command; a bad value becomes one line on stderr and exit code 2."""
    args = parser().parse_args(argv)
    if args.run is train_command:
        for name, value in PRESETS[args.preset].items():
            if getattr(args, name, None) is None:
                setattr(args, name, dtype_here(value, args.device) if name == "dtype" else value)
        if args.optimizer == "galore" and args.rank is None:
            args.rank = max(1, args.n_embd // 4)
        for name in [name for name, value in vars(args).items() if value is None]:
            if name != "tokenizer":
                delattr(args, name)  # the default of the config holds
    try:
        return args.run(args)
    except (ValueError, FloatingPointError, ProcessLost) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
