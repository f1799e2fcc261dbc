r"""Training: a generator of steps.

One step takes a batch, asks how surprised the model is by each next token, and moves every weight a
little against the gradient of that surprise. The caller consumes the steps: to print, to plot, or
to stop.

The learning rate, the batch and the random numbers of a step are functions of its number. A
checkpoint therefore holds the weights, the optimizer's moments and that number, nothing else, and a
run that was killed and resumed gives bitwise the same weights as one that was never interrupted, on
one CPU with the same number of threads.

The learning rate rises linearly for ``warmup`` steps and falls along half a cosine to ``min_lr``,
which it reaches in the last step.

Sources: Loshchilov, Hutter, *Decoupled Weight Decay Regularization*, 2019, arXiv:1711.05101;
*SGDR*, 2017, arXiv:1608.03983 (the cosine).
"""

import json
import math
import time
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_from_scratch.checkpoint import (
    latest_checkpoint,
    load_training_state,
    save_training_state,
)
from lm_from_scratch.data import Batch, PackedBatches
from lm_from_scratch.generate import evaluating
from lm_from_scratch.loss import IGNORE, causal_lm_loss, chunked_causal_lm_loss
from lm_from_scratch.models import CausalLM
from lm_from_scratch.models.qwen2 import Qwen2ForCausalLM
from lm_from_scratch.norm import RMSNorm


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The numbers that define a run, together with the model's and the data's."""

    steps: int
    lr: float = 1e-3
    min_lr: float = 0.0
    warmup: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    grad_accumulation: int = 1  # batches that are summed up before one step
    chunked_loss: bool = False  # a step never holds its logits: for a large vocabulary
    dtype: str = "float32"  # of the matrix products: "bfloat16" runs them under autocast
    eval_every: int = 0  # steps between two measurements of the held-out loss; 0 is never
    checkpoint_every: int = 0  # steps between two checkpoints; 0 is only at the end
    seed: int = 0  # of dropout; the order of the data has its own

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and type(value) is not int:
                raise ValueError(f"{field.name}={value!r} must be an integer")
            if field.type is float and not math.isfinite(value):
                raise ValueError(f"{field.name}={value} must be a finite number")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must be in [0, 1)")
        for name in ("steps", "grad_accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("min_lr", "warmup", "weight_decay", "eval_every", "checkpoint_every", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("lr", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} must not exceed lr={self.lr}")
        if self.warmup >= self.steps:
            raise ValueError(f"warmup={self.warmup} must be shorter than steps={self.steps}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r} must be 'float32' or 'bfloat16'")


@dataclass(frozen=True)
class Step:
    """What one optimizer step reports."""

    step: int  # 1 for the first
    loss: float  # nats per token, over the step's batches
    lr: float
    grad_norm: float  # before clipping
    tokens_per_second: float  # of the training step alone
    held_out_loss: float | None = None


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of ``step`` (1, ..., steps)."""
    if step <= config.warmup:  # 1. rise to lr
        return config.lr * step / config.warmup
    if step > config.steps:  # 2. after the end
        return config.min_lr
    progress = (step - config.warmup) / (config.steps - config.warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))  # 3. from 1 down to 0
    return config.min_lr + cosine * (config.lr - config.min_lr)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay for the matrices; none for biases and norms, which it would only push to 0."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def residual_dropout_(model: Qwen2ForCausalLM, dropout: float) -> None:
    """In training, drop a share of the embeddings, and of what every attention and MLP adds.

    GPT-2 has these three in its config. Qwen2 has none of them, because it sees each text about
    once; a small model that reads a small corpus many times needs them.
    """
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout={dropout} must be in [0, 1)")

    def drop(module: nn.Module, args: object, out: Tensor) -> Tensor:
        return F.dropout(out, dropout, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for block in model.model.layers:
        for part in block.children():
            if not isinstance(part, RMSNorm):
                part.register_forward_hook(drop)


def evaluate(model: CausalLM, batches: Iterable[Batch], dtype: str = "float32") -> float:
    """The mean loss over every target of the batches, in nats per token."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    for batch in batches:
        batch = batch.to(device)
        with evaluating(model), autocast(device, dtype):
            logits = model(batch.idx, batch.positions, batch.documents)
            n = int((batch.targets != IGNORE).sum())
            total += float(causal_lm_loss(logits, batch.targets)) * n
            count += n
    if count == 0:
        raise ValueError("the batches hold no target to evaluate")
    return total / count


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """Matrix products in bfloat16 if ``dtype`` says so; everything else stays float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


def train(
    model: CausalLM,
    batches: PackedBatches,
    config: TrainConfig,
    held_out: list[Batch] | None = None,
    folder: str | Path | None = None,
) -> Generator[Step, None, None]:
    """Train ``model`` in place and yield every step as soon as it is done.

    With a ``folder`` the run writes checkpoints there, and continues from the newest one if there
    is any: the same call starts and resumes a run. A due checkpoint is written when the next step
    is asked for, after the caller has seen the step. Closing the generator (its ``close`` method)
    writes one of the last finished step. The model is left in training mode.

    The caller's random state is untouched.
    """
    if config.eval_every and not held_out:
        raise ValueError(f"eval_every={config.eval_every} needs held-out batches")
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(
        parameter_groups(model, config.weight_decay), lr=config.lr, betas=config.betas, fused=True
    )
    free = ("eval_every", "checkpoint_every")  # they do not change the weights
    recipe = {
        "model": asdict(model.config),
        "train": {name: value for name, value in asdict(config).items() if name not in free},
        "data": {
            "text": batches.file.key,
            "batch_size": batches.batch_size,
            "block_size": batches.block_size,
            "seed": batches.seed,
            "isolate": batches.isolate,
        },
    }
    recipe = json.loads(json.dumps(recipe))  # as it will be read back: tuples become lists
    done = 0
    if folder is not None and (found := latest_checkpoint(folder)) is not None:
        done = load_training_state(found, model, optimizer, recipe)

    def steps() -> Generator[Step, None, None]:
        saved = step = done
        try:
            for step in range(done + 1, config.steps + 1):
                start = time.perf_counter()
                lr = learning_rate(step, config)
                for group in optimizer.param_groups:
                    group["lr"] = lr
                first = (step - 1) * config.grad_accumulation
                parts = [batches[first + i].to(device) for i in range(config.grad_accumulation)]
                with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                    torch.manual_seed(config.seed * 1_000_003 + step)
                    loss, grad_norm = optimizer_step(model, optimizer, parts, config)
                seconds = time.perf_counter() - start
                held_out_loss = None
                if config.eval_every and (step % config.eval_every == 0 or step == config.steps):
                    held_out_loss = evaluate(model, held_out or [], config.dtype)
                tokens = sum(part.idx.numel() for part in parts)
                yield Step(step, loss, lr, grad_norm, tokens / seconds, held_out_loss)
                due = config.checkpoint_every and step % config.checkpoint_every == 0
                if folder is not None and (due or step == config.steps):
                    save_training_state(folder, model, optimizer, recipe, step)
                    saved = step
        except GeneratorExit:  # closed between two steps: the weights are those of `step`
            if folder is not None and step > saved:
                save_training_state(folder, model, optimizer, recipe, step)
            raise

    return steps()


def optimizer_step(
    model: CausalLM,
    optimizer: torch.optim.Optimizer,
    parts: list[Batch],
    config: TrainConfig,
) -> tuple[float, float]:
    """One update from the gradient of all ``parts`` together; returns the loss and gradient norm.

    Each part counts by its number of targets, so that splitting a batch does not change the step. A
    step without any target changes nothing. A gradient that is not finite stops the run before it
    reaches the weights.
    """
    device = next(model.parameters()).device
    model.train()
    optimizer.zero_grad(set_to_none=True)
    counts = [int((part.targets != IGNORE).sum()) for part in parts]
    if sum(counts) == 0:
        return 0.0, 0.0
    total = 0.0
    for part, count in zip(parts, counts, strict=True):
        with autocast(device, config.dtype):
            if config.chunked_loss:
                x = model.backbone(part.idx, part.positions, part.documents)
                loss = chunked_causal_lm_loss(x, model.head_weight, part.targets)
            else:
                loss = causal_lm_loss(model(part.idx, part.positions, part.documents), part.targets)
            loss = loss * (count / sum(counts))
        loss.backward()
        total += float(loss.detach())
    grad_norm = float(nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm))
    if not math.isfinite(grad_norm):
        raise FloatingPointError(
            f"the gradient norm is {grad_norm} (loss {total}): the weights were left as they were. "
            "A smaller learning rate or a longer warm-up may help"
        )
    optimizer.step()
    return total, grad_norm
