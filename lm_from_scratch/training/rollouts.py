"""A run that learns from rewards: batches that the model writes itself, and their loss as a module.

A step asks some questions, lets the model answer each several times (a *group*), has every answer
judged, and makes those more likely that were judged better than their group
(:mod:`lm_from_scratch.training.policy_gradient`). What the model writes in a step is a function of
the seed, the number of the step and the weights: a run that was killed goes on as if it had not
been. In several processes each writes all answers, so that they stay together, and learns from its
share.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lm_from_scratch.generation.generate import check_prompts, complete, generate
from lm_from_scratch.generation.sampling import GREEDY, Sampler
from lm_from_scratch.limits import Count, NotNegative, require
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.models.modes import evaluating
from lm_from_scratch.text.batch import Batch
from lm_from_scratch.text.batches import Shuffled
from lm_from_scratch.text.conversations import Answered, targets_of
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.log_probs import token_log_probs
from lm_from_scratch.training.objective import Objective, autocast
from lm_from_scratch.training.pairs import weights_key
from lm_from_scratch.training.policy_gradient import group_advantages, grpo_loss, token_mean


@dataclass(frozen=True)
class Question:
    """The token ids of a prompt, and the judge of the text that follows it."""

    ids: list[int]
    reward: Callable[[str], float]


@dataclass(frozen=True)
class RolloutBatch(Batch):
    """Answers, whose targets count, with the ``rewards`` and ``advantages`` (B,) of each and, for a
    penalty, the ``reference`` (B, T): the log-probability of each target before the run."""

    rewards: Tensor | None = None
    advantages: Tensor | None = None
    reference: Tensor | None = None

    @property
    def reward(self) -> float | None:
        """The mean reward of the answers."""
        return None if self.rewards is None else float(self.rewards.mean())


class RewardLoss(Objective):
    """The GRPO loss of a batch of answers that the ``model`` has just written, as a mean over all
    their tokens, with ``kl`` times the distance from the reference."""

    def __init__(self, model: CausalLM, dtype: str = "float32", kl: float = 0.0) -> None:
        super().__init__(model, dtype)
        self.kl = kl

    def forward(
        self,
        idx: Tensor,
        targets: Tensor,
        *,
        positions: Tensor,
        documents: Tensor | None = None,
        rewards: Tensor | None = None,
        advantages: Tensor,
        reference: Tensor | None = None,
    ) -> Tensor:
        """The loss of B answers: ``idx``, ``targets``, ``positions`` and ``reference`` are (B, T),
        ``rewards`` and ``advantages`` (B,). There are no ``documents`` (None)."""
        with autocast(idx.device, self.dtype):
            logits = self.model(idx, positions=positions)
        own = token_log_probs(logits, targets)  # (B, T)
        written = targets != IGNORE
        return grpo_loss(
            own,
            own,
            advantages,
            written,
            reference_log_probs=reference,
            kl=self.kl,
            average=token_mean,
        ).loss


class Rollouts:
    """Batch number ``i`` of a run on ``questions``: ``batch_size`` answers, ``group_size`` to each
    question, sampled from ``model`` as it is when the batch is asked for. An answer ends with one
    of the ``stop_tokens``, or after ``max_new_tokens``. ``key`` names the questions. The reference
    of a penalty ``kl`` computes its products in ``dtype``, as the model that learns.

    Raises ``ValueError`` for groups of one answer, which have nothing to compare with, for a
    ``batch_size`` that is not made of whole groups, for fewer questions than groups, and for one
    that does not fit into the model with its answer.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        tokenizer: Tokenizer,
        model: CausalLM,
        key: str,
        batch_size: int,
        group_size: int = 8,
        max_new_tokens: int = 32,
        stop_tokens: Sequence[int] = (),
        kl: float = 0.0,
        seed: int = 0,
        dtype: str = "float32",
    ) -> None:
        require(Count, batch_size=batch_size, group_size=group_size, max_new_tokens=max_new_tokens)
        require(NotNegative, kl=kl)
        if group_size < 2 or batch_size % group_size:
            raise ValueError(
                f"group_size={group_size} must be at least 2, and divide batch_size={batch_size}"
            )
        if len(questions) < batch_size // group_size:
            raise ValueError(
                f"{len(questions)} questions are fewer than the {batch_size // group_size} groups "
                f"of batch_size={batch_size}"
            )
        check_prompts(model, [question.ids for question in questions], max_new_tokens, stop_tokens)
        self.questions, self.tokenizer, self.model, self.key = questions, tokenizer, model, key
        self.batch_size, self.group_size = batch_size, group_size
        self.max_new_tokens, self.stop_tokens, self.kl = max_new_tokens, list(stop_tokens), kl
        self.dtype = dtype
        self.reference = copy.deepcopy(model).requires_grad_(False) if kl else None
        self.reference_key = weights_key(model) if kl else None
        self.order = Shuffled(len(questions), batch_size // group_size, seed)
        self.batches_per_epoch = self.order.batches_per_epoch

    def recipe(self) -> dict[str, object]:
        """All that the batches and their loss depend on, but for the model."""
        return {
            "text": self.key,
            "batch_size": self.batch_size,
            "group_size": self.group_size,
            "max_new_tokens": self.max_new_tokens,
            "stop_tokens": self.stop_tokens,
            "kl": self.kl,
            "reference": self.reference_key,
            "seed": self.order.seed,
        }

    def loss(self, model: CausalLM, dtype: str) -> Objective:
        """What a step makes small."""
        return RewardLoss(model, dtype, self.kl)

    def __getitem__(self, i: int) -> RolloutBatch:
        asked = [self.questions[row] for row in self.order[i]]
        seed = (self.order.seed * 1_000_003 + i) * self.batch_size
        answers = self.sampled(asked, self.group_size, Sampler(), seed)
        rewards = self.judged(asked, answers)
        prompts = [question.ids for question in asked for _ in range(self.group_size)]
        batch = targets_of(
            [
                Answered(prompt + answer, [False] * len(prompt) + [True] * len(answer))
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
        )
        advantages = group_advantages(rewards.view(-1, self.group_size)).flatten()
        before = None if self.reference is None else log_probs_by(self.reference, batch, self.dtype)
        return RolloutBatch(
            **vars(batch),
            rewards=rewards,
            advantages=advantages,
            reference=before,
        )

    def sampled(
        self, asked: Sequence[Question], times: int, sampler: Sampler, seed: int = 0
    ) -> list[list[int]]:
        """The token ids of ``times`` answers to each question, side by side."""
        steps = generate(
            self.model,
            [question.ids for question in asked],
            self.max_new_tokens,
            sampler,
            self.stop_tokens,
            num_return_sequences=times,
            seed=seed,
        )
        return complete(steps)

    def judged(self, asked: Sequence[Question], answers: Sequence[Sequence[int]]) -> Tensor:
        """The reward (N,) of each answer, of as many to each question."""
        times, rewards = len(answers) // len(asked), []
        for n, answer in enumerate(answers):
            question = asked[n // times]
            words = [token for token in answer if token not in self.stop_tokens]
            text = self.tokenizer.decode(words, after=question.ids)
            rewards.append(float(question.reward(text)))
        return torch.tensor(rewards)


def log_probs_by(model: CausalLM, batch: Batch, dtype: str) -> Tensor:
    """The log-probability (B, T) of each target of the ``batch``, in evaluation mode, with products
    in ``dtype``."""
    there = batch.to(model.head.weight.device)
    with evaluating(model), autocast(there.idx.device, dtype):
        logits = model(there.idx, positions=there.positions)
        return token_log_probs(logits, there.targets).cpu()


def mean_reward(
    rollouts: Rollouts,
    questions: Sequence[Question],
    sampler: Sampler = GREEDY,
    rows: int = 64,
) -> float:
    """The mean reward of an answer to each question, by default of the likeliest one; ``rows`` at a
    time. Raises ``ValueError`` if there is none."""
    if not questions:
        raise ValueError("there is no question to answer")
    total = 0.0
    for first in range(0, len(questions), rows):
        asked = questions[first : first + rows]
        answers = rollouts.sampled(asked, 1, sampler, seed=first)
        total += float(rollouts.judged(asked, answers).sum())
    return total / len(questions)
