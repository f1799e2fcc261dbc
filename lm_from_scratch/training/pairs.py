"""A run that learns from preferences: batches of pairs, and the loss of a pair as a module.

Each pair is a question with a better and a worse answer. The reference, against which the model is
judged (:mod:`lm_from_scratch.training.preference`), is the model as it was before the first step:
what it says of every answer is computed once, so that no second model is kept.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lm_from_scratch.limits import Count, Positive, require
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.models.modes import evaluating
from lm_from_scratch.text.batch import Batch
from lm_from_scratch.text.batches import Shuffled, in_order
from lm_from_scratch.text.conversations import Answered, targets_of
from lm_from_scratch.text.examples import check_lengths, examples_key
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.log_probs import sequence_log_probs
from lm_from_scratch.training.objective import Objective, autocast
from lm_from_scratch.training.preference import Preference, dpo_loss


@dataclass(frozen=True)
class PairBatch(Batch):
    """Pairs: ``idx``, ``targets`` and ``positions`` are (B, 2, T), the chosen answer first.
    ``reference`` (B, 2) is the log-probability of each answer under the reference."""

    reference: Tensor | None = None

    @property
    def count(self) -> int:
        """How many pairs there are; one without a target, which fills up a batch, is none."""
        return int((self.targets != IGNORE).any(dim=-1).all(dim=-1).sum())


class PreferenceLoss(Objective):
    """The mean DPO loss of a batch of pairs under a model, for a strength ``beta``."""

    def __init__(self, model: CausalLM, dtype: str = "float32", beta: float = 0.1) -> None:
        super().__init__(model, dtype)
        self.beta = beta

    def forward(
        self,
        idx: Tensor,
        targets: Tensor,
        *,
        positions: Tensor,
        documents: Tensor | None = None,
        reference: Tensor,
    ) -> Tensor:
        """The mean loss of B pairs: ``idx``, ``targets`` and ``positions`` are (B, 2, T),
        ``reference`` (B, 2). There are no ``documents`` (None)."""
        return self.judged(idx, targets, positions, reference).losses.mean()

    def judged(
        self, idx: Tensor, targets: Tensor, positions: Tensor, reference: Tensor
    ) -> Preference:
        """What each pair costs, and what its answers are worth: for ``idx``, ``targets`` and
        ``positions`` (B, 2, T), and ``reference`` (B, 2)."""
        with autocast(idx.device, self.dtype):
            logits = self.model(idx.flatten(0, 1), positions=positions.flatten(0, 1))
        own = sequence_log_probs(logits, targets.flatten(0, 1)).view_as(reference)  # (B, 2)
        return dpo_loss(own[:, 0], own[:, 1], reference[:, 0], reference[:, 1], self.beta)


class PairBatches:
    """Batch number ``i`` of an endless run over ``pairs`` of a chosen and a rejected answer, each
    with its question: a function of the seed and ``i``. ``model`` is the reference; like the model
    that learns, it computes its products in ``dtype``, as the loss is a difference of both.

    Raises ``ValueError`` for an answer that is longer than ``block_size`` with its question, for
    fewer pairs than ``batch_size``, and for a ``beta`` that is not above 0.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Answered, Answered]],
        tokenizer: Tokenizer,
        model: CausalLM,
        batch_size: int,
        block_size: int,
        beta: float = 0.1,
        seed: int = 0,
        dtype: str = "float32",
    ) -> None:
        require(Count, batch_size=batch_size, block_size=block_size)
        require(Positive, beta=beta)
        both = [one for pair in pairs for one in pair]
        check_lengths(both, block_size)
        if len(pairs) < batch_size:
            raise ValueError(
                f"{len(pairs)} pairs are fewer than batch_size={batch_size}: "
                "use more pairs or a smaller batch"
            )
        self.pairs, self.batch_size, self.block_size = list(pairs), batch_size, block_size
        self.beta, self.dtype = beta, dtype
        self.order = Shuffled(len(pairs), batch_size, seed)
        self.batches_per_epoch = self.order.batches_per_epoch
        self.key = examples_key(both, tokenizer)
        self.reference = reference_log_probs(model, both, batch_size, dtype).view(-1, 2)
        self.reference_key = weights_key(model)

    def recipe(self) -> dict[str, object]:
        """All that the batches and their loss depend on, but for the model that learns."""
        return {
            "text": self.key,
            "batch_size": self.batch_size,
            "block_size": self.block_size,
            "seed": self.order.seed,
            "beta": self.beta,
            "reference": self.reference_key,
        }

    def loss(self, model: CausalLM, dtype: str) -> PreferenceLoss:
        """What a step makes small."""
        return PreferenceLoss(model, dtype, self.beta)

    def __getitem__(self, i: int) -> PairBatch:
        return self._batch(self.order[i])

    def each_once(self) -> Iterator[PairBatch]:
        """Every pair once, in order: for what is held out."""
        return map(self._batch, in_order(len(self.pairs), self.batch_size))

    def _batch(self, rows: list[int]) -> PairBatch:
        batch = targets_of([one for row in rows for one in self.pairs[row]])  # (2B, T)
        fields: dict[str, Any] = {
            k: t if t is None else t.unflatten(0, (-1, 2)) for k, t in vars(batch).items()
        }
        return PairBatch(**fields, reference=self.reference[rows])


def preferred(model: CausalLM, pairs: PairBatches) -> int:
    """In how many of the pairs the model has moved towards the chosen answer, from the reference
    and more than towards the rejected one."""
    objective, device, won = pairs.loss(model, pairs.dtype), model.head.weight.device, 0
    with evaluating(model):
        for batch in pairs.each_once():
            fields = {k: t for k, t in vars(batch.to(device)).items() if k != "documents"}
            won += int((objective.judged(**fields).margins > 0).sum())
    return won


def weights_key(model: nn.Module) -> str:
    """A digest of the weights, by which a run that goes on knows its reference again."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        plain = tensor if type(tensor) is Tensor else tensor.dequantize()  # what codes stand for
        digest.update(plain.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def reference_log_probs(
    model: CausalLM, answers: Sequence[Answered], batch_size: int, dtype: str = "float32"
) -> Tensor:
    """The log-probability (N,) of each answer after its question, in evaluation mode, with products
    in ``dtype``."""
    device, log_probs = model.head.weight.device, []
    with evaluating(model):
        for first in range(0, len(answers), 2 * batch_size):
            batch = targets_of(answers[first : first + 2 * batch_size]).to(device)
            with autocast(device, dtype):
                logits = model(batch.idx, positions=batch.positions)
            log_probs.append(sequence_log_probs(logits, batch.targets).cpu())
    return torch.cat(log_probs)
