"""A run that can be killed: its steps, and a folder from which they go on.

The learning rate, the batch and the random numbers of a step are functions of its number. A
checkpoint therefore holds the weights, the optimizer's moments and that number, nothing else, and a
run that was killed and resumed gives bitwise the same weights as one that was never interrupted, on
one CPU with the same number of threads.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lm_from_scratch.checkpoint.state import (
    Damaged,
    checkpoints,
    load_training_state,
    save_training_state,
)
from lm_from_scratch.checkpoint.weights import plain_tensors
from lm_from_scratch.models.heads import Classifier
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.runs.sharded import gathered
from lm_from_scratch.training.train import Run, Step
from lm_from_scratch.weights.lora import adapters


def with_checkpoints(
    run: Run, folder: str | Path, every: int = 0, save: Callable[..., None] = save_training_state
) -> Generator[Step, None, None]:
    """The steps of ``run``, from the newest checkpoint in ``folder`` on, if there is any.

    The same call starts and resumes a run. A checkpoint is written after every ``every``-th step
    and the last one, when the next step is asked for: after the caller has seen the step. Closing
    the generator (its ``close`` method) writes one of the last finished step.

    ``save`` is the way of writing: of one process, or of several,
    :meth:`~lm_from_scratch.runs.distributed.Processes.save_training_state`. Any number of processes
    resumes. A checkpoint whose files are not as they were written is passed over with a warning if
    there is one before it. Raises ``ValueError`` for a folder with another run, for a negative
    ``every``, and where several processes would write as one.
    """
    if every < 0:
        raise ValueError(f"every={every} must not be negative")
    if save is save_training_state and run.processes.size > 1:
        raise ValueError(
            f"{run.processes.size} processes would write the same files: give save their own "
            "save_training_state"
        )
    model, optimizer = run.model, run.optimizer
    if not isinstance(model, CausalLM | Classifier) or not isinstance(optimizer, AdamW):
        kinds = f"{type(model).__name__} with {type(optimizer).__name__}"
        raise ValueError(f"{kinds}: only the models and optimizers of lm_from_scratch are saved")
    recipe = recipe_of(run, model)
    snapshots = checkpoints(folder)
    while snapshots:
        try:
            run.step = load_training_state(snapshots.pop(), model, optimizer, recipe)
            break
        except Damaged as error:
            if not snapshots:
                raise
            if run.processes.rank == 0:
                warnings.warn(f"{error}; going on from {snapshots[-1]}", stacklevel=2)

    def steps() -> Generator[Step, None, None]:
        written = run.step
        try:
            for step in run:
                yield step
                if run.step == run.schedule.steps or (every and run.step % every == 0):
                    save(folder, model, optimizer, recipe, run.step)
                    written = run.step
        except GeneratorExit:  # closed between two steps
            if run.step > written:
                save(folder, model, optimizer, recipe, run.step)
            raise

    return steps()


def recipe_of(run: Run, model: CausalLM | Classifier) -> dict[str, Any]:
    """All that the weights of a run depend on."""
    numbers = dict(run.numbers)
    numbers.pop("eval_every", None)  # which does not change them
    recipe: dict[str, Any] = {
        "model": asdict(model.backbone.config),
        "train": numbers,
        "data": run.batches.recipe(),
    }
    if (frozen := frozen_digest(model)) is not None:
        recipe["frozen"] = frozen
    if maps := adapters(model):
        recipe["adapters"] = {name: [m.rank, m.alpha, m.dropout] for name, m in maps.items()}
    return json.loads(json.dumps(recipe))  # as it will be read back: tuples become lists


def frozen_digest(model: nn.Module) -> str | None:
    """A number that tells whether the frozen weights are the same; ``None`` without any."""
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    digest = hashlib.sha256()
    for name, tensor in plain_tensors(frozen).items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        flat = gathered(tensor.detach()).cpu().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest() if frozen else None
