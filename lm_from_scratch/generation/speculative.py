r"""Speculative decoding: several tokens from one pass of a model, and the same distribution.

Where decoding spends its time on reading the weights, a pass over a few tokens takes hardly longer
than one over a single token. So a cheap *drafter* proposes K tokens, and one pass of the model
judges them all. With :math:`p` the model's distribution at a place, and :math:`q` the one that the
draft :math:`x` was drawn from,

.. math::

   \Pr(\text{accept } x) = \min\!\left(1, \frac{p(x)}{q(x)}\right), \qquad
   \text{else draw from } \frac{\max(0,\, p - q)}{\sum_y \max(0,\, p(y) - q(y))}.

A token comes out with probability :math:`\min(p, q) + \max(0, p - q) = p`: a bad drafter costs
time, not quality. A draft is accepted with probability :math:`\sum_y \min(p(y), q(y))`. What
follows the first rejection is void; what follows a draft without one is drawn from :math:`p`. So
every pass gives at least one token, and at most K + 1.

Sources: Leviathan, Kalman, Matias, *Fast Inference from Transformers via Speculative Decoding*,
2022, arXiv:2211.17192; Chen et al., *Accelerating Large Language Model Decoding with Speculative
Sampling*, 2023, arXiv:2302.01318; Saxena, *Prompt Lookup Decoding*, 2023 (drafts without a model).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lm_from_scratch.attention.visibility import PADDING
from lm_from_scratch.cache.kv import KVCache
from lm_from_scratch.cache.slots import cache_for
from lm_from_scratch.generation.generate import (
    AHEAD,
    cache_with_room,
    check_chunk,
    check_empty,
    check_prompts,
    check_seed,
    decode,
    prefill,
)
from lm_from_scratch.generation.logit_processors import LogitProcessor, processed, sequence
from lm_from_scratch.generation.sampling import Sampler, check_logits, draw
from lm_from_scratch.limits import Count, require
from lm_from_scratch.models.blocks import check_no_states
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.models.modes import evaluating


def accept(p: Tensor, q: Tensor, draft: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """How many drafts of each row are accepted, (B,), and the token that follows these, (B,).

    ``p`` (B, K + 1, V) are the model's probabilities at the K drafts and after them, ``q``
    (B, K, V) those that ``draft`` (B, K) was drawn from. Rows with fewer drafts are filled with -1.
    ``u`` (B, K + 1) in [0, 1): the first number of a row draws its token, the rest judge its draft.
    """
    real = draft >= 0
    at = draft.clamp(min=0)[..., None]  # (B, K, 1)
    p_draft, q_draft = p[:, :-1].gather(2, at)[..., 0], q.gather(2, at)[..., 0]  # (B, K)
    accepted = real & (u[:, 1:] * q_draft < p_draft)
    n = accepted.long().cumprod(dim=1).sum(dim=1)  # (B,)
    # where nothing was proposed q is 0, and what is left of p is p
    q = F.pad(q * real[..., None], (0, 0, 0, 1))  # (B, K + 1, V)
    rows = torch.arange(len(n), device=n.device)
    p, q = p[rows, n], q[rows, n]  # (B, V)
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p)  # rounding alone rejected it
    return n, draw(rest.log(), u[:, 0])


def distribution(sampler: Sampler, logits: Tensor, seen: Tensor) -> Tensor:
    """The probabilities (B, V) that ``sampler`` draws from, by ``logits`` (B, V) and the tokens
    ``seen`` (B, V); greedy ones are 0 and 1.
    """
    wide = torch.float32 if logits.device.type == "mps" else torch.float64  # mps has no float64
    logits = sampler.logits(logits.float(), seen)
    check_logits(logits)
    if sampler.temperature == 0.0:
        return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(wide)
    return logits.to(wide).softmax(dim=-1)


#: Takes all rows so far, how many tokens to propose for each at most, and the random numbers of
#: each. Returns a draft for each row, and the probabilities (B, K, V) from which the drafts were
#: drawn, K being the longest; ``None`` for drafts that are not drawn (1 at the draft, 0 elsewhere).
Propose = Callable[
    [list[list[int]], list[int], list[Generator]], tuple[list[list[int]], Tensor | None]
]


class Drafter(Protocol):
    """Where drafts come from."""

    def start(self, model: CausalLM, sampler: Sampler, longest: int, n_draft: int) -> Propose:
        """Check that ``model`` can be served, up to rows of ``longest`` tokens and drafts of
        ``n_draft``. What is returned proposes, with a state of its own.

        If it has a method ``hear``, that is called after every pass of the model, with the states
        (B, T, C) that its backbone ends with, and the positions (B, T) of its tokens, or ``None``
        where all are real."""


@contextmanager
def heard(model: CausalLM, propose: Propose) -> Iterator[None]:
    """Passes of ``model`` inside are told to a ``propose`` that wants to ``hear`` of them."""
    hear = getattr(propose, "hear", None)
    if hear is None:
        yield
        return

    def tell(module: nn.Module, args: Any, given: dict[str, Any], states: Tensor) -> None:
        hear(states.detach(), given.get("positions"))

    hook = model.backbone.register_forward_hook(tell, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@dataclass(frozen=True)
class PromptLookup:
    """Drafts copied from the row itself, for text that repeats: code, quotations, lists.

    What followed the last earlier occurrence of the last ``ngram`` tokens is the draft. If they did
    not occur, fewer are looked up, down to ``shortest``. A copy that reaches the end of the row
    goes on with what it has copied, so a loop is drafted as a loop. Raises ``ValueError`` for a
    ``shortest`` that is not in 1 ... ``ngram``.
    """

    ngram: int = 3
    shortest: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.ngram:
            raise ValueError(f"shortest={self.shortest} must be in 1 ... ngram={self.ngram}")

    def start(self, model: CausalLM, sampler: Sampler, longest: int, n_draft: int) -> Propose:
        """Proposes what :meth:`look_up` finds, for any model."""
        return lambda rows, wanted, generators: (list(map(self.look_up, rows, wanted)), None)

    def look_up(self, row: Sequence[int], n: int) -> list[int]:
        """The ``n`` tokens that may follow ``row``; none where nothing is found."""
        for size in range(min(self.ngram, len(row) - 1), self.shortest - 1, -1):
            for end in range(len(row) - 1, size - 1, -1):
                if row[end - size : end] == row[-size:]:
                    text = list(row)
                    for source in range(end, end + n):
                        text.append(text[source])
                    return text[len(row) :]
        return []


@dataclass(frozen=True)
class ModelDrafter:
    """Drafts from a model of any architecture with the same vocabulary, drawn as the tokens are.

    It reads the rows through a cache of its own, the prompts in pieces of ``prefill_chunk`` tokens.
    The rows of a vocabulary are often padded, for speed, and in one family not all to one number:
    what one of the two models does not have is not drafted.
    """

    model: CausalLM
    prefill_chunk: int | None = None

    def start(self, model: CausalLM, sampler: Sampler, longest: int, n_draft: int) -> Propose:
        """Proposes tokens of the draft model, from a cache of its own."""
        check_no_states(self.model, "drafting")
        own, other = self.model.config, model.config
        few, many = sorted((own.vocab_size, other.vocab_size))
        if few < 0.75 * many:  # more than padding
            raise ValueError(
                f"the draft model has vocab_size={own.vocab_size}, the model {other.vocab_size}: "
                "their tokens must be the same"
            )
        # neither the last token nor the draft for its place is fed
        if own.position_limit is not None and longest - 2 > own.position_limit:
            raise ValueError(
                f"rows of {longest} tokens do not fit into the draft model's "
                f"block_size={own.position_limit}"
            )
        cache = cache_for(own.windows, reserve=min(longest, AHEAD), slack=n_draft)
        return partial(self._propose, sampler, cache, other.vocab_size)

    def _propose(
        self,
        sampler: Sampler,
        cache: KVCache,
        V: int,
        rows: list[list[int]],
        wanted: list[int],
        generators: list[Generator],
    ) -> tuple[list[list[int]], Tensor | None]:
        if not any(wanted):
            return [[] for _ in rows], None
        # The cache holds drafts. Those that were accepted are in the row, and the last token of the
        # row is new: it is fed in any case, so all before it that is held is right.
        held = cache.lengths.tolist() or [0] * len(rows)
        triples = list(zip(rows, held, wanted, strict=True))
        starts = [min(start, len(row) - 1) if n else start for row, start, n in triples]
        if cache.length:
            cache.crop(torch.tensor(starts, device=cache.lengths.device))
        new = [row[start:] if n else [] for (row, _, n), start in zip(triples, starts, strict=True)]
        device = self.model.head.weight.device
        idx, positions = continued(new, starts, "left", device)
        idx = idx.clamp(max=self.model.config.vocab_size - 1)  # a padding row here: a bad draft
        chunk = self.prefill_chunk
        logits = prefill(self.model, idx, cache, positions=positions, chunk=chunk)  # (B, V)
        seen = seen_before(rows, [[] for _ in rows], V)[:, 0].to(device)  # (B, V)
        ends, want = torch.tensor([[len(row) for row in rows], wanted], device=device)
        q: list[Tensor] = []
        drawn: list[Tensor] = []
        for k, u in enumerate(uniform(generators, wanted).unbind(dim=1)):
            if k > 0:
                here = torch.where(want > k, ends + k - 1, PADDING)
                logits = decode(self.model, drawn[-1], cache, positions=here)
                seen = seen.scatter(1, drawn[-1][:, None], True)
            logits = F.pad(logits, (0, V - logits.shape[-1]), value=-torch.inf)  # or cut
            q.append(distribution(sampler, logits, seen))
            drawn.append(draw(q[-1].log(), u))
        tokens = torch.stack(drawn, dim=1).tolist()  # (B, K)
        return [row[:n] for row, n in zip(tokens, wanted, strict=True)], torch.stack(q, dim=1)


@dataclass(frozen=True)
class Pass:
    """What one pass of the model gave each row: its new tokens (none if it had finished before),
    how many were proposed, and how many of these are among the new tokens."""

    tokens: list[list[int]]
    proposed: list[int]
    accepted: list[int]


def speculate(
    model: CausalLM,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]] | Tensor,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    n_draft: int = 4,
    stop_tokens: Collection[int] = (),
    seed: int = 0,
    cache: KVCache | None = None,
    prefill_chunk: int | None = None,
    processors: Sequence[LogitProcessor] = (),
) -> Iterator[Pass]:
    """Like :func:`lm_from_scratch.generation.generate.generate`, with up to ``n_draft`` drafts for
    each pass.

    Yields one :class:`Pass` for the prompts, which proposes nothing, and one for every pass after
    it. Each row goes on from where its own draft was cut. Tokens have the distribution that
    ``generate`` gives them; with ``temperature=0`` they are the same, up to rounding (a wider pass
    may take its sums in another order). A repetition penalty and the ``processors`` count, at each
    place, the draft before it; drafts are drawn without ``processors``.

    Row ``i`` draws from its own random numbers, seeded with ``seed + i``: for its drafts, for their
    judgement, for the token after them. A ``cache`` needs the room that ``generate`` needs; where
    it slides, a ``slack`` of ``n_draft``. In a batch a growing one keeps the columns of rejected
    drafts where another row accepted its own; a static or paged one uses them again.

    All arguments are checked here and now; the model runs when the first pass is asked for. Raises
    ``ValueError`` as ``generate``, and for a sliding cache with too little slack.
    """
    check_no_states(model, "speculative decoding")
    prompts = check_prompts(model, prompts, max_new_tokens, stop_tokens)
    require(Count, n_draft=n_draft)
    check_seed(seed, len(prompts))
    check_chunk("prefill_chunk", prefill_chunk)
    longest = max(len(prompt) for prompt in prompts) + max_new_tokens
    if cache is None:
        cache = cache_with_room(model, prompts, max_new_tokens, slack=n_draft)
    check_empty(cache)
    if cache.slack is not None and cache.slack < n_draft:
        raise ValueError(
            f"n_draft={n_draft} tokens may have to be taken back, but the cache has "
            f"slack={cache.slack}"
        )
    sampler, processors = sampler or Sampler(), sequence("processors", processors)
    if not isinstance(sampler, Sampler):
        raise ValueError(f"sampler={sampler!r} must be a Sampler")
    propose = drafter.start(model, sampler, longest, n_draft)
    ends = frozenset(stop_tokens)
    return _passes(
        model, propose, prompts, max_new_tokens, sampler, processors, n_draft, ends, seed, cache,
        prefill_chunk,
    )  # fmt: skip


def _passes(
    model: CausalLM,
    propose: Propose,
    rows: list[list[int]],
    max_new_tokens: int,
    sampler: Sampler,
    processors: Sequence[LogitProcessor],
    n_draft: int,
    stop_tokens: frozenset[int],
    seed: int,
    cache: KVCache,
    prefill_chunk: int | None,
) -> Iterator[Pass]:
    check_empty(cache)  # another generation may have begun with it
    device = model.head.weight.device
    idx, positions = continued(rows, [0] * len(rows), "left", device)
    places = positions if len({len(row) for row in rows}) > 1 else None
    with heard(model, propose):
        logits = prefill(model, idx, cache, positions=places, chunk=prefill_chunk)[:, None]
    generators = [Generator().manual_seed(seed + i) for i in range(len(rows))]
    left = [max_new_tokens] * len(rows)  # what each row may still gain; 0 when it has finished
    drafts: list[list[int]] = [[] for _ in rows]
    q = None
    while True:
        counts, following = _judge(sampler, processors, logits, rows, drafts, q, generators)
        gained: list[list[int]] = []
        for i, (n, token) in enumerate(zip(counts, following, strict=True)):
            new = [*drafts[i][:n], token] if left[i] else []
            stops = [k for k, token in enumerate(new, 1) if token in stop_tokens]
            gained.append(new[: stops[0]] if stops else new)
            left[i] = 0 if stops else left[i] - len(new)
        rows = [row + new for row, new in zip(rows, gained, strict=True)]
        starts = [len(row) - 1 for row in rows]
        cache.crop(torch.tensor(starts, device=cache.lengths.device))  # all but the last token
        accepted = [min(n, len(new)) for n, new in zip(counts, gained, strict=True)]
        yield Pass(gained, [len(draft) for draft in drafts], accepted)
        if not any(left):
            return
        wanted = [min(n_draft, max(0, n - 1)) for n in left]  # one token comes without a draft
        drafts, q = propose(rows, wanted, generators)
        if any(len(draft) > n for draft, n in zip(drafts, wanted, strict=True)):
            raise ValueError(f"the drafter proposed {drafts}, more than wanted={wanted} tokens")
        new_tokens = [[r[-1], *d] if n else [] for r, d, n in zip(rows, drafts, left, strict=True)]
        idx, positions = continued(new_tokens, starts, "right", device)
        with evaluating(model), heard(model, propose):
            logits = model(idx, positions=positions, cache=cache)  # (B, K + 1, V)


def _judge(
    sampler: Sampler,
    processors: Sequence[LogitProcessor],
    logits: Tensor,
    rows: list[list[int]],
    drafts: list[list[int]],
    q: Tensor | None,
    generators: list[Generator],
) -> tuple[list[int], list[int]]:
    """:func:`accept`, from logits (B, K + 1, V) at the last token of each row and at its draft."""
    V = logits.shape[-1]
    seen = seen_before(rows, drafts, V).to(logits.device)  # (B, K + 1, V)
    places = []
    for k, (here, marks) in enumerate(zip(logits.unbind(dim=1), seen.unbind(dim=1), strict=True)):
        here = here.float()  # (B, V)
        here = processed(processors, here, [[*r, *d[:k]] for r, d in zip(rows, drafts)])
        places.append(distribution(sampler, here, marks))
    p = torch.stack(places, dim=1)  # (B, K + 1, V)
    draft = padded([torch.tensor(d, dtype=torch.long) for d in drafts], PADDING).to(p.device)
    q = F.one_hot(draft.clamp(min=0), V) if q is None else q  # (B, K, V)
    u = uniform(generators, [len(d) + 1 for d in drafts])  # (B, K + 1)
    n, following = accept(p, q.to(p), draft, u.to(p))
    return n.tolist(), following.tolist()


def padded(rows: list[Tensor], value: int, side: str = "right") -> Tensor:
    """Rows of unequal length, some perhaps empty, in one tensor (B, T, ...)."""
    return pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side)


def continued(
    new: list[list[int]], starts: list[int], side: str, device: torch.device
) -> tuple[Tensor, Tensor]:
    """New tokens for every row, perhaps none, and their positions from ``starts`` on: (B, T)."""
    idx = padded([torch.tensor(tokens, dtype=torch.long) for tokens in new], 0, side)
    places = [torch.arange(n, n + len(tokens)) for n, tokens in zip(starts, new, strict=True)]
    return idx.to(device), padded(places, PADDING, side).to(device)


def uniform(generators: list[Generator], counts: list[int]) -> Tensor:
    """``counts[i]`` random numbers in [0, 1) from generator ``i`` in row ``i``, then zeros."""
    pairs = zip(counts, generators, strict=True)
    return padded([torch.rand(n, generator=g, dtype=torch.float64) for n, g in pairs], 0)


def seen_before(rows: list[list[int]], drafts: list[list[int]], V: int) -> Tensor:
    """The tokens of each row, with the first 0, 1, ... K of its draft: marks (B, K + 1, V)."""
    seen = torch.zeros(len(rows), 1 + max(map(len, drafts)), V, dtype=torch.bool)
    for i, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
        seen[i, :, row] = True
        for k, token in enumerate(draft):
            seen[i, k + 1 :, token] = True
    return seen
