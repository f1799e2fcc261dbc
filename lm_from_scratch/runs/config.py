"""The numbers of a whole run in one object, as a command or a recipe has them, and the run that
they describe."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from lm_from_scratch.limits import Count, Whole
from lm_from_scratch.models.blocks import blocks
from lm_from_scratch.models.heads import SequenceClassifier
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.optim.choose import make_optimizer
from lm_from_scratch.optim.config import OptimizerConfig
from lm_from_scratch.text.batch import Batch
from lm_from_scratch.training.classification_loss import LabelLoss
from lm_from_scratch.training.in_backward import step_in_backward
from lm_from_scratch.training.objective import NextTokenLoss, Objective
from lm_from_scratch.training.processes import SINGLE_PROCESS, SingleProcess
from lm_from_scratch.training.train import Batches, Run, Schedule, optimizer_step


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Schedule, OptimizerConfig):
    """The numbers that define a run, together with the model's and the data's: those of its
    schedule, of its optimizer, and these."""

    grad_accumulation: Count = 1  # batches summed up before each step
    chunked_loss: bool = False  # a step never holds its logits: for large vocabularies
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the matrix products
    eval_every: Whole = 0  # steps between held-out losses; 0 is never
    seed: Whole = 0  # of dropout; the order of the data has its own


def train(
    model: CausalLM | SequenceClassifier,
    batches: Batches,
    config: TrainConfig,
    held_out: Sequence[Batch] | None = None,
    processes: SingleProcess = SINGLE_PROCESS,
    loss: Callable[[CausalLM, str], Objective] | None = None,
) -> Run:
    """The run that trains ``model`` in place, with the optimizer and the loss that ``config`` asks
    for: it yields every step as soon as it is done.

    ``batches`` are packed text (:class:`~lm_from_scratch.text.batches.PackedBatches`), answers to
    questions, labelled texts, or pairs and rewards, which come with a ``loss`` of their own, made
    of the model and a dtype. Raises ``ValueError`` for ``chunked_loss`` with such a loss.
    """
    processes.check(batches.batch_size, config.update_in_backward)
    objective: Objective
    if isinstance(model, SequenceClassifier):
        objective = LabelLoss(model, config.dtype)
    elif loss is None:
        objective = NextTokenLoss(model, config.dtype, config.chunked_loss)
    elif config.chunked_loss:
        raise ValueError("chunked_loss=True is for the loss of the next token alone")
    else:
        objective = loss(model, config.dtype)
    wrapped = processes.wrap(objective, blocks(model))
    return Run(
        model,
        batches,
        make_optimizer(model, config, processes.optimizer),
        wrapped,
        config,
        held_out=held_out or [],
        eval_every=config.eval_every,
        grad_accumulation=config.grad_accumulation,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        take_step=step_in_backward if config.update_in_backward else optimizer_step,
        processes=processes,
        numbers=asdict(config),
    )
