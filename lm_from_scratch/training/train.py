r"""Training: one step after another, for the caller to consume.

One step takes a batch, asks how surprised the model is by each next token, and moves every weight a
little against the gradient of that surprise. A :class:`Run` yields the steps: to print, to plot,
to stop, or to save, as :mod:`lm_from_scratch.runs.checkpoints` does.

The learning rate, the batch and the random numbers of a step are functions of its number.

Which optimizer takes the steps, :mod:`lm_from_scratch.optim.choose` says; what they make small, an
:mod:`objective <lm_from_scratch.training.objective>`. The same loop runs in several processes,
which share out the rows of each batch: :mod:`lm_from_scratch.runs.distributed`.

Source: Loshchilov, Hutter, *SGDR*, 2017, arXiv:1608.03983 (the cosine).
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Protocol

import torch
from torch import nn

from lm_from_scratch.limits import (
    Count,
    Limit,
    NotNegative,
    Positive,
    Whole,
    check,
    require,
)
from lm_from_scratch.models.modes import evaluating
from lm_from_scratch.text.batch import Batch
from lm_from_scratch.training.objective import objective_of
from lm_from_scratch.training.processes import SINGLE_PROCESS, SingleProcess

_BELOW_LR = Limit("must not exceed lr={lr}", lambda x, lr: x <= lr, "lr")
_SHORTER = Limit("must be shorter than steps={steps}", lambda n, steps: n < steps, "steps")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long a run is, and how large its steps are: the learning rate rises linearly for
    ``warmup`` steps and falls along half a cosine to ``min_lr``, which it reaches in the last."""

    steps: Count  # length of the run and of its schedule
    lr: Positive = 1e-3  # highest learning rate
    min_lr: Annotated[NotNegative, _BELOW_LR] = 0.0  # learning rate of the last step
    warmup: Annotated[Whole, _SHORTER] = 0  # steps until the highest learning rate

    def __post_init__(self) -> None:
        check(self)


def learning_rate(step: int, schedule: Schedule) -> float:
    """The learning rate of ``step`` (1, ..., steps)."""
    if step <= schedule.warmup:  # 1. rise to lr
        return schedule.lr * step / schedule.warmup
    if step > schedule.steps:  # 2. after the end
        return schedule.min_lr
    progress = (step - schedule.warmup) / (schedule.steps - schedule.warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))  # 3. from 1 down to 0
    return schedule.min_lr + cosine * (schedule.lr - schedule.min_lr)


def optimizer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: list[Batch],
    max_grad_norm: float = 1.0,
    processes: SingleProcess = SINGLE_PROCESS,
) -> tuple[float, float]:
    """One update from the gradient of all ``parts`` together; returns the loss and gradient norm.

    ``model`` is an objective, or a language model, which is judged by its next tokens. A norm above
    ``max_grad_norm`` is clipped to that. A step without any target changes nothing. A gradient that
    is not finite raises ``FloatingPointError`` before it reaches the weights.
    """
    loss = accumulate_gradient(model, optimizer, parts, processes)
    if loss is None:
        return 0.0, 0.0
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    grad_norm = processes.number(norm)
    if not math.isfinite(grad_norm):
        raise FloatingPointError(
            f"the gradient norm is {grad_norm} (loss {loss}): the weights were left as they were. "
            "A smaller learning rate or a longer warm-up may help"
        )
    optimizer.step()
    return loss, grad_norm


def accumulate_gradient(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: list[Batch],
    processes: SingleProcess = SINGLE_PROCESS,
) -> float | None:
    """The loss of all ``parts`` together, whose gradient is then in the weights; ``None``, and no
    gradient, if there is no target.

    Each part counts by its number of targets, so that splitting a batch does not change the step,
    whether into parts or among processes (which have wrapped the objective ``model``).
    """
    objective = objective_of(model)
    device = next(model.parameters()).device
    model.train()
    optimizer.zero_grad(set_to_none=True)
    count = sum(part.count for part in parts)  # of all processes
    if count == 0:
        return None
    total = 0.0
    for number, part in enumerate(parts, start=1):
        part = processes.share(part).to(device)
        with processes.accumulating(objective, last=number == len(parts)):
            loss = objective(**vars(part)) * (part.count / count)
            (loss * processes.size).backward()  # the mean over processes becomes a sum
        total += float(loss.detach())
    (total,) = processes.total(total)
    return total


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    dtype: str = "float32",
    processes: SingleProcess = SINGLE_PROCESS,
) -> float:
    """The mean loss over every target of the batches, in nats per token.

    ``model`` is an objective, or a language model that computes its products in ``dtype``. In
    several processes it is the wrapped objective, and each takes its rows. Raises ``ValueError`` if
    there is no target.
    """
    objective = objective_of(model, dtype)
    device = next(model.parameters()).device
    total, count = 0.0, 0.0
    for batch in batches:
        batch = processes.share(batch).to(device)
        with evaluating(objective):
            loss = objective(**vars(batch))
        total += float(loss) * batch.count
        count += batch.count
    processes.evaluated(objective)
    total, count = processes.total(total, count)
    if count == 0:
        raise ValueError("the batches hold no target to evaluate")
    return total / count


class Batches(Protocol):
    """What a run takes its steps on: batch number ``i``, whichever steps came before."""

    batch_size: int  # rows of each, over all processes
    batches_per_epoch: int  # until every row was there once

    def __getitem__(self, i: int) -> Batch: ...

    def recipe(self) -> dict[str, object]:
        """All that the batches depend on."""
        ...


@dataclass(frozen=True)
class Step:
    """What one optimizer step reports."""

    step: int  # 1 for the first
    loss: float  # nats per token, over the step's batches
    lr: float
    grad_norm: float  # before clipping; NaN with update_in_backward
    tokens_per_second: float  # of the training step alone
    held_out_loss: float | None = None
    reward: float | None = None  # the mean over what the model wrote, where it learns from rewards


@dataclass
class Run(Iterator[Step]):
    """Trains ``model`` in place: every step is yielded as soon as it is done.

    ``loss`` is the objective that belongs to the ``batches``: a module around the model, as the
    processes wrap it. Between two steps, the next one depends on the weights of the model, the
    state of the ``optimizer`` and the number of the last ``step``: with these three put back, the
    run goes on. The model is left in training mode, the caller's random state untouched.

    In several ``processes`` all of them make this with the same arguments, and take the same steps.
    A batch is shared out by rows, so the run is that of one process, but for rounding and for the
    random numbers of dropout. Raises ``ValueError`` for numbers that do not fit together.
    """

    model: nn.Module
    batches: Batches
    optimizer: torch.optim.Optimizer
    loss: nn.Module
    schedule: Schedule
    held_out: Sequence[Batch] = ()
    eval_every: int = 0  # steps between held-out losses; 0 is never
    grad_accumulation: int = 1  # batches summed up before each step
    max_grad_norm: float = 1.0
    seed: int = 0  # of dropout; the order of the data has its own
    take_step: Callable[..., tuple[float, float]] = optimizer_step
    processes: SingleProcess = SINGLE_PROCESS
    numbers: Mapping[str, Any] = field(default_factory=dict)  # all that its weights depend on
    step: int = 0

    def __post_init__(self) -> None:
        require(Count, grad_accumulation=self.grad_accumulation)
        require(Whole, eval_every=self.eval_every, seed=self.seed)
        if self.eval_every and not self.held_out:
            raise ValueError(f"eval_every={self.eval_every} needs held-out batches")
        if not self.numbers:
            groups = [
                {k: v for k, v in group.items() if k not in ("params", "lr")}
                for group in self.optimizer.param_groups
            ]
            self.numbers = {
                **asdict(self.schedule),
                **{"optimizer": type(self.optimizer).__name__, "groups": groups},
                **{"loss": type(self.loss).__name__, "take_step": self.take_step.__name__},
                **{name: getattr(self, name) for name in ("grad_accumulation", "max_grad_norm")},
                "seed": self.seed,
            }

    def __next__(self) -> Step:
        step, n = self.step + 1, self.grad_accumulation
        if step > self.schedule.steps:
            raise StopIteration
        start = time.perf_counter()
        lr = learning_rate(step, self.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        parts = [self.batches[i] for i in range((step - 1) * n, step * n)]
        device = next(self.model.parameters()).device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed * 1_000_003 + step + self.processes.rank * 10**9)
            loss, norm = self.take_step(
                self.loss, self.optimizer, parts, self.max_grad_norm, self.processes
            )
        seconds = time.perf_counter() - start
        held_out_loss = None
        if self.eval_every and (step % self.eval_every == 0 or step == self.schedule.steps):
            held_out_loss = evaluate(self.loss, self.held_out, processes=self.processes)
        self.step = step
        tokens = sum(part.idx.numel() for part in parts)
        rewards = [part.reward for part in parts if part.reward is not None]
        reward = sum(rewards) / n if rewards else None
        return Step(step, loss, lr, norm, tokens / seconds, held_out_loss, reward)
