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
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lm_from_scratch.cache import GrowingCache
from lm_from_scratch.data import padded_batch
from lm_from_scratch.models import CausalLM
from lm_from_scratch.sampling import Sampler
from lm_from_scratch.tokenizer import Tokenizer


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout) and no gradients inside; each module's own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]] | Tensor,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    stop_tokens: Collection[int] = (),
    num_return_sequences: int = 1,
    seed: int = 0,
) -> Iterator[list[int | None]]:
    """Yield the next token of every row, step after step; ``None`` for a row that has finished.

    ``prompts`` are token ids, of any lengths. Each gives ``num_return_sequences`` rows, side by
    side. A row finishes with a stop token (which is yielded) or after ``max_new_tokens``.

    Row ``i`` draws from its own random numbers, seeded with ``seed + i``: what it says does not
    depend on the other rows, and row 1 of seed 0 is row 0 of seed 1. The model runs in evaluation
    mode; between two yields it is in the mode in which it was given.

    All arguments are checked here and now; the model runs when the first token is asked for.
    """
    sampler = sampler or Sampler()
    config = model.config
    if isinstance(prompts, Tensor):
        prompts = prompts.tolist()
    if not 0 <= seed < 2**63 - len(prompts) * max(num_return_sequences, 1):
        raise ValueError(f"seed={seed} must be in 0 ... 2**63 - 1")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if num_return_sequences < 1:
        raise ValueError(f"num_return_sequences={num_return_sequences} must be at least 1")
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("every prompt needs at least one token: start from the end-of-text token")
    for prompt in prompts:
        for token in prompt:
            if not isinstance(token, int) or not 0 <= token < config.vocab_size:
                raise ValueError(f"token id {token} is not below vocab_size={config.vocab_size}")
    for token in stop_tokens:
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"stop token {token} is not below vocab_size={config.vocab_size}")
    longest = max(len(prompt) for prompt in prompts)
    # the last token that is generated is never fed back, so it needs no position
    limit = config.position_limit
    if limit is not None and longest + max_new_tokens - 1 > limit:
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} do not fit into "
            f"block_size={limit}"
        )
    rows = [list(prompt) for prompt in prompts for _ in range(num_return_sequences)]
    return _steps(model, rows, max_new_tokens, sampler, frozenset(stop_tokens), seed)


def _steps(
    model: CausalLM,
    rows: list[list[int]],
    max_new_tokens: int,
    sampler: Sampler,
    stop_tokens: frozenset[int],
    seed: int,
) -> Iterator[list[int | None]]:
    device = model.head_weight.device
    batch = padded_batch(rows, pad_token_id=0, side="left").to(device)
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(rows))]
    seen = torch.zeros(len(rows), model.config.vocab_size, dtype=torch.bool, device=device)
    for i, row in enumerate(rows):
        seen[i, row] = True
    finished = [False] * len(rows)

    # Rows of one length need no positions; the model then knows that nothing is padding.
    unequal = len({len(row) for row in rows}) > 1
    positions = batch.positions if unequal else None
    cache = GrowingCache(model.config.n_layer)
    idx = batch.idx
    for _ in range(max_new_tokens):
        with evaluating(model):
            logits = model(idx, positions, cache=cache, keep=slice(-1, None))[:, -1]  # (B, V)
            u = torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])
            tokens = sampler(logits.float(), seen, u)
            seen.scatter_(1, tokens[:, None], True)
        ids = tokens.tolist()
        yield [None if done else token for token, done in zip(ids, finished, strict=True)]
        finished = [done or token in stop_tokens for token, done in zip(ids, finished, strict=True)]
        if all(finished):
            return
        idx = tokens[:, None]
        positions = positions[:, -1:] + 1 if positions is not None else None


def complete(steps: Iterator[list[int | None]]) -> list[list[int]]:
    """Run a generation to its end and return the new tokens of each row."""
    rows: list[list[int]] = []
    for step in steps:
        rows = rows or [[] for _ in step]
        for row, token in zip(rows, step, strict=True):
            if token is not None:
                row.append(token)
    return rows


def generate_text(
    model: CausalLM,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int = 200,
    sampler: Sampler | None = None,
    seed: int = 0,
) -> Iterator[str]:
    """Yield the text that follows ``prompt``, piece by piece, until the model ends the document.

    The prompt stands at the start of a new document, as the end-of-text token before it says.
    """
    end = tokenizer.eos_token_id
    ids = [end, *tokenizer.encode(prompt)]
    steps = generate(model, [ids], max_new_tokens, sampler, stop_tokens=[end], seed=seed)
    tokens = (step[0] for step in steps)
    return tokenizer.stream(token for token in tokens if token is not None and token != end)


def forward_seconds(model: CausalLM, idx: Tensor, repeats: int = 5) -> float:
    """The median time of one forward pass over ``idx`` (B, T), in seconds.

    In evaluation mode, without gradients, after one pass that is not counted: the first one pays
    for memory and kernels that later ones find ready.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
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
    """The rows of a padded tensor (B, T) as prompts: only what its mask (1 for tokens) keeps."""
    if attention_mask is None:
        return idx.tolist()
    if attention_mask.shape != idx.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, idx {tuple(idx.shape)}"
        )
    return [row[keep].tolist() for row, keep in zip(idx, attention_mask != 0, strict=True)]
