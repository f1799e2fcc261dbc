"""Generation: one token at a time, each fed back in.

Two phases: *prefill* runs the whole prompt through the model and fills the cache; *decode* runs one
new token per row. Prompts of unequal length are padded on the left, so that the last column is the
last token of every row; their positions make the padding invisible, so each row is what it would
be alone, up to rounding: the sums of a larger batch may be taken in another order. In float32 that
hardly ever changes a token; in bfloat16 a near-tie may fall the other way.
"""

import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.cache.interface import Cache
from lm_from_scratch.cache.kv import KVCache
from lm_from_scratch.cache.slots import StaticCache, cache_for
from lm_from_scratch.generation.logit_processors import LogitProcessor, processed, sequence
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.limits import Count, is_integer, require, shown
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.models.modes import evaluating
from lm_from_scratch.text.batch import padded_batch

#: A cache begins with room for so many new tokens, and grows if more are said.
AHEAD = 1024


def prefill(
    model: CausalLM,
    idx: Tensor,
    cache: Cache,
    *,
    positions: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Run the prompts ``idx`` (B, T) at ``positions`` (B, T) through the model; the logits (B, V)
    of the last column. The ``cache`` then holds them.

    In pieces of ``chunk`` columns, the largest tensors are as wide as a piece, not as the prompt.
    """
    check_chunk("chunk", chunk)
    pieces = idx.split(chunk or idx.shape[1], dim=1)
    places = [None] * len(pieces)
    if positions is not None:
        places = positions.split(chunk or idx.shape[1], dim=1)
    with evaluating(model), without_bookkeeping():
        for piece, place in zip(pieces, places, strict=True):
            logits = model(piece, positions=place, cache=cache, keep=slice(-1, None))  # (B, 1, V)
    return logits[:, -1].clone()  # a tensor as any other: one that may be written into


def without_bookkeeping() -> AbstractContextManager[Any]:
    """Inference mode, which spares every tensor the notes that autograd makes. Not among several
    processes: there FSDP keeps tensors of a pass, which training needs as well."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.no_grad() if distributed else torch.inference_mode()


def decode(
    model: CausalLM, tokens: Tensor, cache: Cache, *, positions: Tensor | None = None
) -> Tensor:
    """Run one new token of every row, ``tokens`` (B,), at ``positions`` (B,); the logits (B, V)."""
    place = None if positions is None else positions[:, None]
    with evaluating(model), without_bookkeeping():
        logits = model(tokens[:, None], positions=place, cache=cache)  # (B, 1, V)
    return logits[:, -1].clone()  # a tensor as any other: one that may be written into


def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]] | Tensor,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    stop_tokens: Collection[int] = (),
    num_return_sequences: int = 1,
    seed: int = 0,
    cache: KVCache | None = None,
    prefill_chunk: int | None = None,
    processors: Sequence[LogitProcessor] = (),
) -> Iterator[list[int | None]]:
    """Yield the next token of every row, step after step; ``None`` for a row that has finished.

    ``prompts`` are token ids, of any lengths. Each is read once, and gives ``num_return_sequences``
    rows, side by side. A row finishes with a stop token (which is yielded) or after
    ``max_new_tokens``. ``processors`` change the logits before the ``sampler`` does.

    Any empty ``cache`` will do; without one, the smallest that loses nothing is made. (To go on
    from a filled one, use :func:`prefill` and :func:`decode`.) Prompts are read in pieces of
    ``prefill_chunk`` tokens.

    Row ``i`` draws from its own random numbers, seeded with ``seed + i``: what it says does not
    depend on the other rows, and row 1 of seed 0 is row 0 of seed 1. The model runs in evaluation
    mode; between two yields it is in the mode in which it was given.

    All arguments are checked here and now; the model runs when the first token is asked for. Raises
    ``ValueError`` for prompts that the model cannot read, and for a cache in use.
    """
    require(Count, num_return_sequences=num_return_sequences)
    prompts = check_prompts(model, prompts, max_new_tokens, stop_tokens)
    check_seed(seed, len(prompts) * num_return_sequences)
    check_chunk("prefill_chunk", prefill_chunk)
    if cache is None:
        cache = cache_with_room(model, prompts, max_new_tokens)
    check_empty(cache)
    rows = [prompt for prompt in prompts for _ in range(num_return_sequences)]
    choose = Chooser(rows, sampler or Sampler(), processors, seed)
    ends = frozenset(stop_tokens)
    return _steps(model, prompts, max_new_tokens, choose, ends, cache, prefill_chunk)


def cache_with_room(
    model: CausalLM, prompts: Sequence[Sequence[int]], max_new_tokens: int, slack: int = 0
) -> KVCache:
    """The smallest cache that loses nothing of ``prompts`` and the tokens that follow them; so many
    can be taken back as it has ``slack``."""
    reserve = max(len(prompt) for prompt in prompts) + min(max_new_tokens, AHEAD)
    return cache_for(model.config.windows, reserve=reserve, slack=slack)


def check_seed(seed: int, rows: int) -> None:
    """Raises ``ValueError`` for a seed that cannot be counted up for so many rows."""
    if type(seed) is not int or not 0 <= seed < 2**63 - rows:
        raise ValueError(f"seed={seed} must be in 0 ... 2**63 - 1")


def check_chunk(name: str, chunk: int | None) -> None:
    """Raises ``ValueError`` for a piece of no tokens."""
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise ValueError(f"{name}={chunk} must be a whole number of at least 1")


def check_empty(cache: KVCache) -> None:
    """Raises ``ValueError`` for a cache that is in use, or keeps nothing."""
    if not isinstance(cache, KVCache):
        raise ValueError(f"the cache is a {type(cache).__name__}: it must keep keys and values")
    if cache.batch is not None:
        raise ValueError(
            f"the cache holds {cache.length} tokens already; it must be empty (prefill and decode "
            "go on from one that is not)"
        )


def check_prompts(
    model: CausalLM,
    prompts: Sequence[Sequence[int]] | Tensor,
    max_new_tokens: int,
    stop_tokens: Collection[int] = (),
) -> list[list[int]]:
    """The prompts as lists. Raises ``ValueError`` if the model cannot read them, or write as much
    after them."""
    config = model.config
    if isinstance(prompts, Tensor):
        prompts = prompts.tolist() if prompts.dim() == 2 else [prompts.tolist()]
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be a whole number of at least 1")
    prompts = [p.tolist() if isinstance(p, Tensor) else p for p in sequence("prompts", prompts)]
    if not all(isinstance(prompt, Sequence) for prompt in prompts):
        raise ValueError("prompts must be lists of token ids, one list for each row")
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("every prompt needs at least one token: start from the end-of-text token")
    for prompt in prompts:
        for token in prompt:
            if not isinstance(token, int) or isinstance(token, bool):
                raise ValueError(f"token id {token!r} must be an int, not {type(token).__name__}")
            if not 0 <= token < config.vocab_size:
                raise ValueError(f"token id {token} is not below vocab_size={config.vocab_size}")
    for token in sequence("stop_tokens", stop_tokens):
        if type(token) is not int or not 0 <= token < config.vocab_size:
            raise ValueError(f"stop token {token!r} is no id below vocab_size={config.vocab_size}")
    longest = max(len(prompt) for prompt in prompts)
    # the last token that is generated is never fed back, so it needs no position
    limit = config.position_limit
    if limit is not None and longest + max_new_tokens - 1 > limit:
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} do not fit into "
            f"block_size={limit}"
        )
    return [list(prompt) for prompt in prompts]


class Chooser:
    """Chooses the next token of every row, and remembers what choosing depends on: the tokens in
    the row (``rows``), and its own random numbers."""

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        sampler: Sampler,
        processors: Sequence[LogitProcessor] = (),
        seed: int = 0,
    ) -> None:
        if not callable(sampler):
            raise ValueError(f"sampler={sampler!r} must be a Sampler")
        self.rows = [list(row) for row in rows]
        self.sampler, self.processors = sampler, sequence("processors", processors)
        self.generators = [torch.Generator().manual_seed(seed + i) for i in range(len(rows))]
        self.seen: Tensor | None = None  # (B, V), once V is known

    def __call__(self, logits: Tensor, finished: Sequence[bool] = ()) -> Tensor:
        """The next token (B,) of every row, from logits (B, V).

        Rows that have ``finished`` are left alone: nothing is drawn, their last token stays.
        """
        logits = logits.float()
        if self.seen is None:
            with torch.inference_mode(False):  # may be written into outside of it, too
                self.seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
            for seen, row in zip(self.seen, self.rows, strict=True):
                seen[row] = True
        marks, rows, generators = self.seen, self.rows, self.generators
        going = [i for i in range(len(rows)) if not (finished and finished[i])]
        if len(going) < len(rows):
            logits, marks = logits[going], marks[going]
            rows, generators = [rows[i] for i in going], [generators[i] for i in going]
        logits = processed(self.processors, logits, rows)
        u = [torch.rand(1, generator=g, dtype=torch.float64) for g in generators]
        chosen: Any = self.sampler(logits, marks, torch.cat(u))
        ids = chosen.tolist() if isinstance(chosen, Tensor) else chosen
        V, each = self.seen.shape[1], isinstance(ids, list) and len(ids) == len(going)
        if not each or not all(is_integer(n, 0) and n < V for n in ids):
            raise ValueError(
                f"the sampler chose {shown(ids)}: it must choose one token below {V} for each "
                f"of {len(going)} rows"
            )
        for i, token in zip(going, ids, strict=True):
            self.rows[i].append(token)
            self.seen[i, token] = True
        return torch.tensor([row[-1] for row in self.rows], device=logits.device)

    def read(self, tokens: Sequence[int]) -> None:
        """Every row goes on with these tokens, which it has not chosen."""
        for row in self.rows:
            row.extend(tokens)
        if self.seen is not None:
            self.seen[:, list(tokens)] = True

    def mark(self) -> list[tuple[int, Tensor]]:
        """Where every row stands, for :meth:`back_to`."""
        pairs = zip(self.rows, self.generators, strict=True)
        return [(len(row), generator.get_state()) for row, generator in pairs]

    def back_to(self, mark: list[tuple[int, Tensor]]) -> None:
        """As if nothing had been chosen since; what is chosen then is the same."""
        self.seen = None
        for row, generator, (length, state) in zip(self.rows, self.generators, mark, strict=True):
            del row[length:]
            generator.set_state(state)


def _steps(
    model: CausalLM,
    prompts: list[list[int]],
    max_new_tokens: int,
    choose: Chooser,
    stop_tokens: frozenset[int],
    cache: KVCache,
    prefill_chunk: int | None,
) -> Iterator[list[int | None]]:
    check_empty(cache)  # another generation may have begun with it
    batch = padded_batch(prompts, pad_token_id=0, side="left").to(model.head.weight.device)
    # Rows of one length need no positions; the model then knows that nothing is padding. Fixed
    # shapes want them all the same: a length that changes would be compiled into the graph.
    explicit = len({len(prompt) for prompt in prompts}) > 1 or isinstance(cache, StaticCache)
    positions = batch.positions if explicit else None
    logits = prefill(model, batch.idx, cache, positions=positions, chunk=prefill_chunk)
    last = positions[:, -1] if positions is not None else None
    times = len(choose.rows) // len(prompts)
    if times > 1:
        cache.repeat(times)
        logits = logits.repeat_interleave(times, dim=0)
        last = last.repeat_interleave(times) if last is not None else None
    finished = [False] * len(choose.rows)
    tokens = choose(logits)
    for more in reversed(range(max_new_tokens)):
        ids = tokens.tolist()
        yield [None if done else token for token, done in zip(ids, finished, strict=True)]
        finished = [done or token in stop_tokens for token, done in zip(ids, finished, strict=True)]
        if all(finished) or not more:
            return
        last = last + 1 if last is not None else None
        tokens = choose(decode(model, tokens, cache, positions=last), finished)


def complete(steps: Iterator[list[int | None]]) -> list[list[int]]:
    """Run a generation to its end and return the new tokens of each row."""
    rows: list[list[int]] = []
    for step in steps:
        rows = rows or [[] for _ in step]
        for row, token in zip(rows, step, strict=True):
            if token is not None:
                row.append(token)
    return rows


def forward_seconds(model: CausalLM, idx: Tensor, repeats: int = 5) -> float:
    """The median time of one forward pass over ``idx`` (B, T), in seconds.

    In evaluation mode, without gradients, after one pass that is not counted: the first one pays
    for memory and kernels that later ones find ready. Raises ``ValueError`` for ``repeats`` below
    1.
    """
    require(Count, repeats=repeats)
    seconds = []
    with evaluating(model):
        for _ in range(repeats + 1):
            start = time.perf_counter()
            model(idx)
            if idx.is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def as_prompts(idx: Tensor, attention_mask: Tensor | None = None) -> list[list[int]]:
    """The rows of a padded ``idx`` (B, T) as prompts: only what its ``attention_mask`` (B, T), 1
    for tokens, keeps."""
    if attention_mask is None:
        return idx.tolist()
    if attention_mask.shape != idx.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, idx {tuple(idx.shape)}"
        )
    return [row[keep].tolist() for row, keep in zip(idx, attention_mask != 0, strict=True)]
