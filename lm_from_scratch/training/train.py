r"""Training: one step after another, for the caller to consume.

One step takes a batch, asks how surprised the model is by each next token, and moves every weight a
little against the gradient of that surprise. :func:`train` yields the steps: to print, to plot, to
stop, or to save, as :mod:`lm_from_scratch.runs.saved` does.

The learning rate, the batch and the random numbers of a step are functions of its number.

The learning rate rises linearly for ``warmup`` steps and falls along half a cosine to ``min_lr``,
which it reaches in the last step.

The same loop runs in several processes, which share out the rows of each batch:
:mod:`lm_from_scratch.runs.distributed`.

Sources: Loshchilov, Hutter, *Decoupled Weight Decay Regularization*, 2019, arXiv:1711.05101;
*SGDR*, 2017, arXiv:1608.03983 (the cosine).
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from lm_from_scratch.limits import (
    Count,
    Limit,
    NotNegative,
    Positive,
    Whole,
    check,
    is_plain,
)
from lm_from_scratch.models.blocks import blocks
from lm_from_scratch.models.heads import SequenceClassifier
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.models.modes import evaluating
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.optim.in_backward import update_in_backward
from lm_from_scratch.optim.muon import Muon
from lm_from_scratch.text.batches import Batch
from lm_from_scratch.training.loss import causal_lm_loss, chunked_causal_lm_loss
from lm_from_scratch.training.processes import ALONE, Alone

#: The numbers of a run that are GaLore's alone.
GALORE = ("rank", "update_proj_gap", "scale", "projection_type", "moments", "basis")

_BELOW_LR = Limit("must not exceed lr={lr}", lambda x, lr: x <= lr, "lr")
_SHORTER = Limit("must be shorter than steps={steps}", lambda n, steps: n < steps, "steps")
_ABOVE_0 = Limit("must be above 0", lambda x: x == math.inf or (is_plain(x) and x > 0))
_SHARES = Limit("must be in [0, 1)", lambda b: all(is_plain(beta) and 0 <= beta < 1 for beta in b))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The numbers that define a run, together with the model's and the data's."""

    steps: Count  # length of the run and of its schedule
    lr: Positive = 1e-3  # highest learning rate
    min_lr: Annotated[NotNegative, _BELOW_LR] = 0.0  # learning rate of the last step
    warmup: Annotated[Whole, _SHORTER] = 0  # steps until the highest learning rate
    betas: Annotated[tuple[float, float], _SHARES] = (0.9, 0.95)  # of the moments
    weight_decay: NotNegative = 0.1  # shrinks matrices, not biases and norms
    max_grad_norm: Annotated[float, _ABOVE_0] = 1.0  # math.inf does not clip
    optimizer: Literal["adamw", "galore", "muon"] = "adamw"  # of the blocks' matrices
    optim_bits: int = 32  # of each number in the optimizer's moments: 32, or 8 for less memory
    rank: Count = 128  # galore: directions of each matrix
    update_proj_gap: Count = 200  # galore: steps for one basis
    scale: float = 0.25  # galore: factor of the matrices' steps, so lr * scale is their rate
    projection_type: str = "std"  # galore: which side of a matrix is projected
    moments: str = "keep"  # galore: what a new basis does to them
    basis: str = "gram"  # galore: how it is found
    muon_scale: Positive = 1.0  # muon: factor of the matrices' steps
    update_in_backward: bool = False  # step within the backward pass: less memory, no clipping
    grad_accumulation: Count = 1  # batches summed up before each step
    chunked_loss: bool = False  # a step never holds its logits: for large vocabularies
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the matrix products
    eval_every: Whole = 0  # steps between held-out losses; 0 is never
    seed: Whole = 0  # of dropout; the order of the data has its own

    def __post_init__(self) -> None:
        check(self)
        GaLore([torch.zeros(1)], optim_bits=self.optim_bits, **galore_options(self))  # checks them
        if self.optimizer == "muon":
            Muon([torch.zeros(1)], optim_bits=self.optim_bits, **muon_options(self))
        if self.update_in_backward and self.max_grad_norm != math.inf:
            raise ValueError(
                f"max_grad_norm={self.max_grad_norm} must be inf with update_in_backward: the norm "
                "of all gradients is known only when all weights have been updated"
            )


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


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of ``step`` (1, ..., steps)."""
    if step <= config.warmup:  # 1. rise to lr
        return config.lr * step / config.warmup
    if step > config.steps:  # 2. after the end
        return config.min_lr
    progress = (step - config.warmup) / (config.steps - config.warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))  # 3. from 1 down to 0
    return config.min_lr + cosine * (config.lr - config.min_lr)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for the matrices; none for biases and norms, which it would only push to 0."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def galore_options(config: TrainConfig) -> dict[str, Any]:
    """The options of a group of matrices that GaLore projects."""
    return {name: getattr(config, name) for name in GALORE}


def muon_options(config: TrainConfig) -> dict[str, Any]:
    """The options of a group of matrices that Muon moves."""
    return {"momentum": 0.95, "scale": config.muon_scale}


def make_optimizer(model: nn.Module, config: TrainConfig, processes: Alone = ALONE) -> AdamW:
    """AdamW; or GaLore or Muon for the matrices of the blocks, and AdamW for all other weights.

    The embedding, the head, the norms and the biases stay with AdamW, as in the papers: the rows
    of an embedding each have a gradient of their own.
    """
    groups = parameter_groups(model, config.weight_decay)
    options: dict[str, Any] = dict(
        lr=config.lr, betas=config.betas, fused=True, optim_bits=config.optim_bits
    )
    if config.optimizer == "adamw":
        return processes.optimizer(AdamW)(groups, **options)
    of_blocks = {id(parameter) for parameter in blocks(model).parameters()}
    matrices, others = groups
    within = [p for p in matrices["params"] if id(p) in of_blocks]
    matrices["params"] = [p for p in matrices["params"] if id(p) not in of_blocks]
    muon = config.optimizer == "muon"
    special = muon_options(config) if muon else galore_options(config)
    groups = [{**matrices, "params": within, **special}, matrices, others]
    return processes.optimizer(Muon if muon else GaLore)(groups, **options)


def state_bytes(model: nn.Module, config: TrainConfig) -> int:
    """How many bytes the optimizer of a run will keep between two steps."""
    optimizer = make_optimizer(model, config)
    return sum(
        value.nbytes
        for group in optimizer.param_groups
        for p in group["params"]
        for value in optimizer.new_state(p.to("meta"), group).values()
    )


class Objective(nn.Module):
    """A model and its loss in one module: what DDP and FSDP wrap. It is called with the fields of a
    batch, and computes products in ``dtype``."""

    model: Any

    def __init__(self, model: nn.Module, dtype: str = "float32") -> None:
        super().__init__()
        self.model, self.dtype = model, dtype


class Loss(Objective):
    """The loss of the next token, or of a label. A model that computes with kernels brings its own
    ``loss`` and ``chunked_loss``."""

    def __init__(
        self, model: CausalLM | SequenceClassifier, dtype: str = "float32", chunked: bool = False
    ) -> None:
        super().__init__(model, dtype)
        self.chunked = chunked
        self.loss: Callable[..., Tensor] = getattr(model, "loss", causal_lm_loss)
        self.chunked_loss = getattr(model, "chunked_loss", chunked_causal_lm_loss)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """The mean loss over the targets (B, T) of the tokens ``idx``, at ``positions`` and in
        ``documents`` (B, T)."""
        with autocast(idx.device, self.dtype):
            if isinstance(self.model, SequenceClassifier):  # one target (B,) for each row
                return self.loss(self.model(idx, positions=positions), targets)
            if self.chunked:
                x = self.model.backbone(idx, positions=positions, documents=documents)
                return self.chunked_loss(x, self.model.head.weight, targets)
            return self.loss(self.model(idx, positions=positions, documents=documents), targets)


def loss_module(model: CausalLM | nn.Module, dtype: str, chunked: bool = False) -> nn.Module:
    """The :class:`Loss` of a model; of an objective, wrapped or not, that one itself."""
    if isinstance(getattr(model, "module", model), Objective):
        return model
    return Loss(cast(CausalLM, model), dtype, chunked)


def evaluate(
    model: CausalLM | nn.Module,
    batches: Iterable[Batch],
    dtype: str = "float32",
    processes: Alone = ALONE,
) -> float:
    """The mean loss over every target of the batches, in nats per token.

    In several processes ``model`` is the wrapped :class:`Loss`, and each takes its rows. Raises
    ``ValueError`` if there is no target.
    """
    loss_of = loss_module(model, dtype)
    device = next(model.parameters()).device
    total, count = 0.0, 0.0
    for batch in batches:
        batch = processes.share(batch).to(device)
        with evaluating(loss_of):
            loss = loss_of(**vars(batch))
        total += float(loss) * batch.count
        count += batch.count
    processes.evaluated(loss_of)
    total, count = processes.total(total, count)
    if count == 0:
        raise ValueError("the batches hold no target to evaluate")
    return total / count


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """Matrix products in bfloat16 if ``dtype`` says so; everything else stays float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


class Batches(Protocol):
    """What a run takes its steps on: batch number ``i``, whichever steps came before."""

    batch_size: int  # rows of each, over all processes
    batches_per_epoch: int  # until every row was there once

    def __getitem__(self, i: int) -> Batch: ...

    def recipe(self) -> dict[str, object]:
        """All that the batches depend on."""
        ...


def train(
    model: CausalLM | SequenceClassifier,
    batches: Batches,
    config: TrainConfig,
    held_out: Sequence[Batch] | None = None,
    processes: Alone = ALONE,
    loss: Callable[[CausalLM, str], Objective] | None = None,
) -> "Run":
    """Train ``model`` in place: a :class:`Run` yields every step as soon as it is done.

    ``batches`` are packed text (:class:`~lm_from_scratch.text.batches.PackedBatches`), answers to
    questions, labelled texts for a classifier. Pairs and rewards come with a ``loss`` of their own,
    a module around the model and a dtype for its products; the others have :class:`Loss`.

    The model is left in training mode, the caller's random state untouched.

    In several ``processes`` all of them call this with the same arguments, and take the same steps.
    A batch is shared out by rows, so the run is that of one process, but for rounding and for the
    random numbers of dropout. Raises ``ValueError`` for a model without anything to train, and for
    numbers that do not fit together.
    """
    if config.eval_every and not held_out:
        raise ValueError(f"eval_every={config.eval_every} needs held-out batches")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("all parameters are frozen (requires_grad=False): nothing can be trained")
    processes.check(batches.batch_size, config.update_in_backward)
    if loss is None:
        judged: Objective = Loss(model, config.dtype, config.chunked_loss)
    elif config.chunked_loss:
        raise ValueError("chunked_loss=True is for the loss of the next token alone")
    else:
        judged = loss(cast(CausalLM, model), config.dtype)
    loss_of = processes.wrap(judged, blocks(model))
    optimizer = make_optimizer(model, config, processes)
    return Run(model, optimizer, batches, config, held_out or [], loss_of, processes)


@dataclass
class Run(Iterator[Step]):
    """A run between two steps. The next one depends on the weights of the ``model``, the state of
    the ``optimizer`` and the number of the last ``step``: with these three put back, it goes on."""

    model: CausalLM | SequenceClassifier
    optimizer: AdamW
    batches: Batches
    config: TrainConfig
    held_out: Sequence[Batch]
    loss_of: nn.Module  # the model and its loss, as the processes wrap them
    processes: Alone = ALONE
    step: int = 0

    def __next__(self) -> Step:
        config, optimizer, step = self.config, self.optimizer, self.step + 1
        if step > config.steps:
            raise StopIteration
        start = time.perf_counter()
        lr = learning_rate(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        n = config.grad_accumulation
        parts = [self.batches[i] for i in range((step - 1) * n, step * n)]
        device = next(self.model.parameters()).device
        with (
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            update_in_backward(optimizer, n) if config.update_in_backward else nullcontext(),
        ):
            torch.manual_seed(config.seed * 1_000_003 + step + self.processes.rank * 10**9)
            loss, norm = optimizer_step(self.loss_of, optimizer, parts, config, self.processes)
        seconds = time.perf_counter() - start
        held_out_loss = None
        if config.eval_every and (step % config.eval_every == 0 or step == config.steps):
            held_out_loss = evaluate(self.loss_of, self.held_out, config.dtype, self.processes)
        self.step = step
        tokens = sum(part.idx.numel() for part in parts)
        rewards = [part.reward for part in parts if part.reward is not None]
        reward = sum(rewards) / n if rewards else None
        return Step(step, loss, lr, norm, tokens / seconds, held_out_loss, reward)


def optimizer_step(
    model: CausalLM | nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: list[Batch],
    config: TrainConfig,
    processes: Alone = ALONE,
) -> tuple[float, float]:
    """One update from the gradient of all ``parts`` together; returns the loss and gradient norm.

    Each part counts by its number of targets, so that splitting a batch does not change the step,
    whether into parts or among processes (where ``model`` is the wrapped :class:`Loss`). A step
    without any target changes nothing. A gradient that is not finite raises ``FloatingPointError``
    before it reaches the weights. With ``update_in_backward`` the weights are updated when the last
    backward pass ends, and there is no norm of all gradients to return (NaN).
    """
    loss_of = loss_module(model, config.dtype, config.chunked_loss)
    device = next(model.parameters()).device
    model.train()
    optimizer.zero_grad(set_to_none=True)
    count = sum(part.count for part in parts)  # of all processes
    if count == 0:
        return 0.0, 0.0
    total = 0.0
    for number, part in enumerate(parts, start=1):
        part = processes.share(part).to(device)
        with processes.accumulating(loss_of, last=number == len(parts)):
            loss = loss_of(**vars(part)) * (part.count / count)
            (loss * processes.size).backward()  # the mean over processes becomes a sum
        total += float(loss.detach())
    (total,) = processes.total(total)
    if config.update_in_backward:
        optimizer.step()  # for weights that were not in every backward pass
        return total, math.nan
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    grad_norm = processes.number(norm)
    if not math.isfinite(grad_norm):
        raise FloatingPointError(
            f"the gradient norm is {grad_norm} (loss {total}): the weights were left as they were. "
            "A smaller learning rate or a longer warm-up may help"
        )
    optimizer.step()
    return total, grad_norm
