"""``train``: a model on text, in a folder that a later run goes on with."""

import contextlib
import math
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from lm_from_scratch.checkpoint.folders import read_json, write_json
from lm_from_scratch.checkpoint.weights import load_checkpoint, save_pretrained
from lm_from_scratch.commands.answers import instructions, preferences, rewards
from lm_from_scratch.commands.loading import device_named, new_folder
from lm_from_scratch.commands.presets import of
from lm_from_scratch.commands.setups import (
    Setup,
    classification,
    config_in,
    continuation,
    name_of,
)
from lm_from_scratch.commands.speed import choose_products, possible_ways
from lm_from_scratch.commands.train_options import (
    DEFAULTS,
    WAYS,
    Classify,
    Dpo,
    FromFolder,
    Grpo,
    NewModel,
    Pretrain,
    Sft,
    TrainOptions,
    flag_of,
)
from lm_from_scratch.instruments.onednn import onednn_matmul, use_onednn_
from lm_from_scratch.interop.peft import save_lora
from lm_from_scratch.models.gpt2 import GPT2Config
from lm_from_scratch.optim.choose import state_bytes
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.program import PROGRAM
from lm_from_scratch.runs.checkpoints import with_checkpoints
from lm_from_scratch.runs.config import TrainConfig, train
from lm_from_scratch.runs.distributed import Processes, ProcessLost, processes, watching_signals
from lm_from_scratch.runs.folder import cut_log, follow, how_to_go_on, only_run_in


def run(options: TrainOptions) -> int:
    """Prepare the data, then train until the end or Ctrl-C."""
    out = Path(options.run.out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; it must be a folder")
    new_folder(
        options.run.out, options.model.from_ if isinstance(options.model, FromFolder) else None
    )
    options = with_rank(options)
    device = device_named(options.run.device)
    try:
        with processes(options.run.parallel, device) as group:
            options = replace(options, run=replace(options.run, device=str(group.device)))
            with only_run_in(out) if group.rank == 0 else silence():
                recipe = out / "recipe.json"
                begun = {}
                if recipe.is_file():
                    begun = read_json(recipe).get("arguments", {})
                    refuse_other_recipe(out, begun, options.arguments())
                return train_in(out, options, begun, group)
    except ProcessLost as lost:
        print(f"error: {lost}; {how_to_go_on(out)}", file=sys.stderr)
        return 2
    except BrokenPipeError as error:
        raise ValueError(f"the output was closed; {how_to_go_on(out)}") from error


def with_rank(options: TrainOptions) -> TrainOptions:
    """The options with GaLore's rank, which the width of the model gives."""
    steps, model = options.steps, options.model
    if steps.optimizer != "galore" or steps.rank is not None:
        return options
    n_embd = model.n_embd if isinstance(model, NewModel) else config_in(model).n_embd
    return replace(options, steps=replace(steps, rank=max(1, n_embd // 4)))


@contextmanager
def silence() -> Iterator[None]:
    """Print nothing: of several processes, one speaks."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def refuse_other_recipe(out: Path, begun: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Refuse to go on with a run under other numbers, before any of its files is touched. What a
    recipe does not say was the default."""
    free = {"preset", "checkpoint_every", "eval_every"}  # they do not change the weights
    free |= {name for name in ("dtype", "library") if arguments[name] == "auto"}
    for name in sorted({*arguments, *WAYS, "from"} - free):
        was, now = (recipe.get(name, DEFAULTS.get(name)) for recipe in (begun, arguments))
        if was != now:
            longer = f", or train its model further with --from {out / 'model'} and another --out"
            further = longer if name == "steps" and (out / "model").is_dir() else ""
            raise ValueError(
                f"{out} holds a run with {flag_of(name)} {was}, not {now}: give the same numbers "
                f"to go on, or another --out{further}"
            )


def setup_of(out: Path, options: TrainOptions, group: Processes) -> Setup:
    """All that the run begins with: how the model is to learn."""
    match options.way:
        case Pretrain() as way:
            return continuation(out, options, way, group)
        case Classify() as way:
            return classification(out, options, way, group)
        case Sft() as way:
            return instructions(out, options, way, group)
        case Dpo() as way:
            return preferences(out, options, way, group)
        case Grpo() as way:
            return rewards(out, options, way, group)


def train_config_of(options: TrainOptions) -> TrainConfig:
    """The numbers of the run."""
    steps = options.steps
    numbers = {k: v for k, v in of(TrainConfig, vars(steps)).items() if v is not None}
    if steps.update_in_backward:
        numbers["max_grad_norm"] = math.inf
    if steps.dtype == "auto":
        del numbers["dtype"]  # is chosen later
    config = TrainConfig(**numbers, chunked_loss=options.chunked_loss, seed=options.run.seed)
    possible_ways(options)
    if options.kernels and (dropout := gpt2_dropout(options)):
        raise ValueError(
            f"--kernels have no attention dropout, but --dropout {dropout}: give --dropout 0"
        )
    return config


def gpt2_dropout(options: TrainOptions) -> float:
    """The dropout of a GPT-2, which may come from a folder; 0 for a Qwen2, whose is outside."""
    dropout = options.steps.dropout
    if isinstance(options.model, NewModel):
        return dropout or 0.0 if options.model.architecture == "gpt2" else 0.0
    config = config_in(options.model)
    if not isinstance(config, GPT2Config):
        return 0.0
    return max(config.attn_pdrop, config.resid_pdrop) if dropout is None else dropout


def train_in(out: Path, options: TrainOptions, begun: dict[str, Any], group: Processes) -> int:
    """The run itself, in a folder that is its own, perhaps one that has ``begun``."""
    config = train_config_of(options)
    group.check(options.steps.batch_size, config.update_in_backward)
    ready = setup_of(out, options, group)
    model, batches = ready.model, ready.batches
    print(
        f"{ready.summary}; {sum(p.numel() for p in model.parameters())} parameters; "
        f"{batches.batches_per_epoch} batches an epoch"
    )
    if config.optimizer != "adamw" or config.optim_bits != 32:
        adamw = replace(config, optimizer="adamw", optim_bits=32)
        size, adamw_size = (state_bytes(model, c) / 1e6 for c in (config, adamw))
        print(f"the optimizer keeps {size:.1f} MB, AdamW in 32 bits would keep {adamw_size:.1f} MB")
    if group.parallel:
        rows = options.steps.batch_size // group.size
        print(f"{group.size} processes, {rows} rows each: {group.parallel}")
    dtype, library = choose_products(model, options, begun, group)
    config = replace(config, dtype=dtype)
    if library == "onednn":
        use_onednn_(model)
    run = train(model, batches, config, ready.held_out, group, ready.loss)
    if library == "onednn" and isinstance(run.optimizer, GaLore):
        run.optimizer.matmul = onednn_matmul
    save = partial(group.save_training_state, published=ready.published)
    steps = with_checkpoints(run, out, options.run.checkpoint_every, save)
    if group.rank == 0:
        sizes = asdict(model.backbone.config)
        arguments = {**options.arguments(), "dtype": dtype, "library": library}
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
        stop = follow(steps, log, config.steps, done, options.run.quiet, group)
    if stop is not None:
        print(f"stopped after step {stop.step}; the same command goes on from there")
        return 128 + stop.signal
    if group.rank == 0:
        if options.lora:  # whose checkpoints have no model
            trained = model
        else:
            trained = load_checkpoint(out / f"step-{config.steps:08}").model
        if ready.result:
            print(ready.result(trained))
        if isinstance(options.model, FromFolder) and options.lora:
            base = name_of(options.model)
            save_lora(trained, out / "model", base, ready.tokenizer, ready.published)
        else:
            save_pretrained(trained, out / "model", ready.tokenizer, published=ready.published)
    print(f"model written to {out / 'model'}")
    model_folder = shlex.quote(str(out / "model"))
    command = "classify" if isinstance(options.way, Classify) else "generate"
    print(f"try: {PROGRAM} {command} --model {model_folder} {ready.ask}")
    return 0
