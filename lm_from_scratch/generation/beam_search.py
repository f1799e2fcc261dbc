r"""Beam search: look for a likely text, not for a likely next token.

The most likely first token need not begin the most likely text. Greedy search takes it and never
looks back; beam search keeps the n most likely beginnings, the *beams*. Each step makes every beam
one token longer in every possible way, and keeps the n of these candidates whose tokens
:math:`y_1 \dots y_t` are the most likely after the prompt x:

.. math::

   \log p(y \mid x) = \sum_{i=1}^{t} \log p(y_i \mid x, y_1 \dots y_{i-1})

A candidate that ends with a stop token does not go on. It is *finished* if it is among the n best
of its step, and dropped otherwise. Every token makes the sum smaller, so finished hypotheses of
different lengths compete with

.. math::

   \text{score}(y) = \log p(y \mid x) \, / \, t^{\,\alpha}

where t counts the new tokens, the stop token too, and :math:`\alpha` is ``length_penalty``: 0 is
the sum, 1 the mean, and the larger it is, the better for long texts. Beams that are left after
``max_new_tokens`` finish there.

The results are those of ``transformers`` 5, with two exceptions. It fills the places of beams and
hypotheses that do not exist with scores of -1e9, which come out as results where few tokens are
allowed, or where a strongly negative ``length_penalty`` makes real scores worse than that; here
nothing is filled. And it runs greedy search for one beam, whatever the other arguments say; here
``early_stopping="never"`` lets one beam, too, look further than the first stop token.

Sources: Lowerre, *The HARPY Speech Recognition System*, 1976 (the search); Wu et al., *Google's
Neural Machine Translation System*, 2016, arXiv:1609.08144 (scores by length); Huang, Zhao, Ma,
*When to Finish? Optimal Beam Search for Neural Text Generation*, 2017, arXiv:1809.00069 (its end).
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lm_from_scratch.cache.kv import KVCache
from lm_from_scratch.generation.generate import (
    cache_with_room,
    check_empty,
    check_prompts,
    decode,
    prefill,
)
from lm_from_scratch.generation.logit_processors import LogitProcessor, processed, sequence
from lm_from_scratch.generation.sampling import Number, check_logits
from lm_from_scratch.limits import Count, require
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.text.batch import padded_batch

EarlyStopping = bool | Literal["never"]
Fate = Literal["kept", "finished", "dropped"]


@dataclass(frozen=True)
class Hypothesis:
    """Tokens that may follow a prompt, and what became of them in the step that added the last."""

    tokens: tuple[int, ...]  # without the prompt
    log_probability: float  # the sum over the tokens
    score: float  # the sum, normalised by length
    parent: int  # which of the hypotheses kept in the step before has all tokens but the last
    fate: Fate


def beam_search(
    model: CausalLM,
    prompts: Sequence[Sequence[int]] | Tensor,
    max_new_tokens: int,
    num_beams: int,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    num_return_sequences: int = 1,
    stop_tokens: Collection[int] = (),
    processors: Sequence[LogitProcessor] = (),
    cache: KVCache | None = None,
) -> list[list[Hypothesis]]:
    """For each prompt the ``num_return_sequences`` finished hypotheses of best score, best first.

    There are fewer where fewer exist. The other arguments are those of :func:`beam_steps`. Raises
    ``ValueError`` for numbers out of range, and as :func:`beam_steps`.
    """
    require(Count, num_beams=num_beams, num_return_sequences=num_return_sequences)
    if num_return_sequences > num_beams:
        raise ValueError(
            f"num_return_sequences={num_return_sequences} must be in 1 ... num_beams={num_beams}"
        )
    steps = beam_steps(
        model, prompts, max_new_tokens, num_beams, length_penalty, early_stopping,
        stop_tokens, processors, cache,
    )  # fmt: skip
    finished: list[list[Hypothesis]] = []
    for step in steps:
        finished = finished or [[] for _ in step]
        for hypotheses, candidates in zip(finished, step, strict=True):
            hypotheses += [candidate for candidate in candidates if candidate.fate == "finished"]
    for hypotheses in finished:
        hypotheses.sort(key=lambda hypothesis: hypothesis.score, reverse=True)
    return [hypotheses[:num_return_sequences] for hypotheses in finished]


def beam_steps(
    model: CausalLM,
    prompts: Sequence[Sequence[int]] | Tensor,
    max_new_tokens: int,
    num_beams: int,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    stop_tokens: Collection[int] = (),
    processors: Sequence[LogitProcessor] = (),
    cache: KVCache | None = None,
) -> Iterator[list[list[Hypothesis]]]:
    """Yield, step after step, the candidates of every prompt, most likely first: the search tree.

    They are the ``num_beams`` best ways to continue each beam, and one more for every stop token. A
    prompt whose search is over has none. It is over when ``num_beams`` hypotheses have finished
    and, with ``early_stopping``

    ``True``
        at once;
    ``False``
        when the best beam, as long as it is now, scores no better than the worst of the best
        ``num_beams``. With a ``length_penalty`` above 0 a longer text might still have done so;
    ``"never"``
        when no text that begins like a beam can score better (unless a processor raises
        log-probabilities above 0).

    ``processors`` change the log-probabilities (rows, V) of the next token; a token at -inf is no
    candidate. What is left is not normalised again, so that a search in which tokens are forbidden
    ranks texts as the model does. Any empty ``cache`` will do.

    All arguments are checked here and now; the model runs when the first step is asked for. Raises
    ``ValueError`` for numbers out of range, prompts that the model cannot read, and a cache in use.
    """
    require(Count, num_beams=num_beams)
    require(Number, length_penalty=length_penalty)
    if early_stopping not in (True, False, "never"):
        raise ValueError(f"early_stopping={early_stopping!r} must be True, False or 'never'")
    prompts = check_prompts(model, prompts, max_new_tokens, stop_tokens)
    if not abs(length_penalty) * math.log(max_new_tokens) < 700:  # exp(709) is the largest float
        raise ValueError(
            f"length_penalty={length_penalty}: max_new_tokens={max_new_tokens} to this power must "
            "be a finite number above 0"
        )
    if cache is None:
        cache = cache_with_room(model, prompts, max_new_tokens)
    check_empty(cache)
    rules = _Rules(num_beams, max_new_tokens, length_penalty, early_stopping, set(stop_tokens))
    return _steps(model, prompts, rules, sequence("processors", processors), cache)


@dataclass(frozen=True)
class _Rules:
    """What becomes of the candidates of one prompt, and when its search is over."""

    num_beams: int
    max_new_tokens: int
    length_penalty: float
    early_stopping: EarlyStopping
    stop_tokens: set[int]

    def score(self, log_probability: float, length: int) -> float:
        return log_probability / length**self.length_penalty

    def judge(
        self, beams: list[Hypothesis], totals: list[list[float]], token_ids: list[list[int]]
    ) -> list[Hypothesis]:
        """The candidates, best first, from the best next tokens of each beam and their sums."""
        candidates = [
            (total, parent, token)
            for parent in range(len(beams))
            for total, token in zip(totals[parent], token_ids[parent], strict=True)
            if total > -math.inf
        ]
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        judged, room = [], self.num_beams
        for rank, (total, parent, token) in enumerate(candidates):
            tokens = (*beams[parent].tokens, token)
            ends = token in self.stop_tokens or len(tokens) == self.max_new_tokens
            fate: Fate = "dropped"
            if ends and rank < self.num_beams:
                fate = "finished"
            elif not ends and room:
                fate, room = "kept", room - 1
            judged.append(Hypothesis(tokens, total, self.score(total, len(tokens)), parent, fate))
        return judged

    def is_over(self, beams: list[Hypothesis], scores: list[float]) -> bool:
        """Whether nothing more is expected of beams, given the scores of all that has finished."""
        if not beams:
            return True
        if len(scores) < self.num_beams:
            return False
        best = beams[0].score
        if self.early_stopping == "never":
            # a sum only falls: with a penalty above 0 the last length is the best, else this one
            best = max(best, self.score(beams[0].log_probability, self.max_new_tokens))
        elif self.early_stopping:
            return True
        return best <= sorted(scores)[-self.num_beams]


def _steps(
    model: CausalLM,
    prompts: list[list[int]],
    rules: _Rules,
    processors: Sequence[LogitProcessor],
    cache: KVCache,
) -> Iterator[list[list[Hypothesis]]]:
    check_empty(cache)  # another search may have begun with it
    batch = padded_batch(prompts, pad_token_id=0, side="left").to(model.head.weight.device)
    # Rows of one length need no positions; the model then knows that nothing is padding.
    unequal = len({len(prompt) for prompt in prompts}) > 1
    places = batch.positions if unequal else None
    logits = prefill(model, batch.idx, cache, positions=places)  # (B, V)
    beams = [[Hypothesis((), 0.0, 0.0, 0, "kept")] for _ in prompts]
    scores: list[list[float]] = [[] for _ in prompts]
    while True:
        # A row for each beam, those of one prompt side by side: (rows, V), at first (B, V).
        check_logits(logits)
        texts = [[*p, *beam.tokens] for p, own in zip(prompts, beams) for beam in own]
        log_probs = logits.float().log_softmax(dim=-1)
        log_probs = processed(processors, log_probs, texts)
        if log_probs.isnan().any():
            raise ValueError("a processor gives NaN: no token can be chosen")
        sums = [beam.log_probability for own in beams for beam in own]
        totals = log_probs + torch.tensor(sums, device=log_probs.device)[:, None]
        # Of one beam, no more than these can be kept or finished.
        width = min(rules.num_beams + len(rules.stop_tokens), totals.shape[1])
        best = totals.topk(width, dim=-1)
        values, tokens = best.values.tolist(), best.indices.tolist()

        step, parents, start = [], [], 0
        for i, own in enumerate(beams):
            rows = slice(start, start + len(own))
            step.append(rules.judge(own, values[rows], tokens[rows]))
            scores[i] += [h.score for h in step[i] if h.fate == "finished"]
            beams[i] = [h for h in step[i] if h.fate == "kept"]
            if rules.is_over(beams[i], scores[i]):
                beams[i] = []
            parents += [start + beam.parent for beam in beams[i]]
            start = rows.stop
        yield step
        if not parents:
            return

        # Each beam goes on from the keys and values of its parent: at first, from the prompt's.
        device = logits.device
        cache.select(torch.tensor(parents, device=device))
        last = torch.tensor([b.tokens[-1] for own in beams for b in own], device=device)
        ends = [len(p) + len(b.tokens) - 1 for p, own in zip(prompts, beams) for b in own]
        positions = torch.tensor(ends, device=device) if unequal else None
        logits = decode(model, last, cache, positions=positions)
