"""Continuous batching: requests join and leave a running batch.

A batch that starts and ends together wastes most of its rows: the short answers wait for the
longest. An engine decides anew at every step which requests it runs. Three ideas make that cheap:

* rows live in a paged cache (:mod:`lm_from_scratch.cache.paged`), so a request needs no memory of
  a fixed length, and gives its blocks back the moment it ends;
* requests that begin alike share blocks: the tokens in a full block, and all before them, are
  looked up, and found blocks are not computed again;
* where the pool runs out, the youngest request gives its blocks back and waits. Nothing is lost:
  its tokens are read again later.

What a request says is what it would say alone, up to rounding.

Sources: Yu et al., *Orca: A Distributed Serving System for Transformer-Based Generative Models*,
2022 (batches that change at every step); Kwon et al., 2023, arXiv:2309.06180 (paged memory).
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from lm_from_scratch.attention.visibility import PADDING
from lm_from_scratch.cache.paged import BlockPool, PagedCache, Row
from lm_from_scratch.generation.generate import Chooser, check_prompts, check_seed, prefill
from lm_from_scratch.generation.logit_processors import LogitProcessor
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.models.causal_lm import CausalLM
from lm_from_scratch.text.batches import padded_batch


@dataclass(eq=False, kw_only=True)
class Request:
    """One prompt, and how it is to be continued: the arguments of ``generate`` for one row."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampler: Sampler = field(default_factory=Sampler)
    stop_tokens: Collection[int] = ()
    processors: Sequence[LogitProcessor] = ()
    seed: int = 0


@dataclass(eq=False)
class Running:
    """A request in the engine: its row of the pool holds the first tokens of ``tokens``."""

    number: int
    request: Request
    choose: Chooser
    start: int  # tokens of the prompt
    row: Row = field(default_factory=Row)

    @property
    def tokens(self) -> list[int]:
        """The prompt and what was said so far."""
        return self.choose.rows[0]

    @property
    def said(self) -> list[int]:
        """The new tokens."""
        return self.tokens[self.start :]

    @property
    def finished(self) -> bool:
        """Whether its last token is a stop token, or the last that it may say."""
        said = self.said
        full = len(said) >= self.request.max_new_tokens
        return full or (bool(said) and said[-1] in self.request.stop_tokens)


class PerRequest(dict[int, int]):
    """A number for each request, by the request's number."""


@dataclass
class Step:
    """What one step of an engine did; requests by number."""

    fed: PerRequest = field(default_factory=PerRequest)  # tokens that were run
    shared: PerRequest = field(default_factory=PerRequest)  # tokens found in shared blocks
    said: PerRequest = field(default_factory=PerRequest)  # the new token
    finished: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)  # no next token could be chosen
    put_back: list[int] = field(default_factory=list)  # lost their blocks, and wait again
    passes: int = 0  # of the model: one that reads prompts, one that writes, or both
    places: int = 0  # rows times columns of these passes, padding included
    blocks: int = 0  # of the pool, in use at the end


class Engine:
    """Runs requests over one pool, at most ``max_batch`` at a time.

    A prompt is read in pieces of at most ``prefill_chunk`` tokens, one a step, so that a long one
    does not hold up the others. With ``share_prefixes`` full blocks stay in the pool after their
    request has ended, until the memory is needed. Nothing runs until the steps are asked for::

        number = engine.submit(Request(prompt=ids, max_new_tokens=50))
        for step in engine.run():
            ...
        engine.results[number]  # or engine.errors[number]
    """

    def __init__(
        self,
        model: CausalLM,
        pool: BlockPool,
        max_batch: int = 16,
        prefill_chunk: int = 256,
        share_prefixes: bool = True,
        cache_type: type[PagedCache] = PagedCache,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        config = model.config
        heads = getattr(config, "n_kv_head", config.n_head)
        wanted = (config.n_layer, heads, config.head_dim, model.head_weight.dtype)
        given = (len(pool.keys), *pool.keys.shape[2:], pool.keys.dtype)
        if wanted != given:
            raise ValueError(
                f"the pool is for (layers, key heads, D, dtype) = {given}, the model has {wanted}"
            )
        self.model, self.pool = model, pool
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk
        self.share_prefixes, self.cache_type = share_prefixes, cache_type
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []  # the oldest first
        self.results: dict[int, list[int]] = {}  # what finished requests said
        self.errors: dict[int, ValueError] = {}  # why failed ones could not go on
        self.prefixes: dict[tuple[int, ...], int] = {}  # tokens up to the end of a block: the block
        self._submitted = 0

    def submit(self, request: Request) -> int:
        """Put a request into the queue; its number.

        Raises ``ValueError`` for a prompt that the model or the pool cannot hold.
        """
        prompt = check_prompts(
            self.model, [request.prompt], request.max_new_tokens, request.stop_tokens
        )
        blocks = self._blocks(len(prompt[0]) + request.max_new_tokens - 1)
        if blocks > len(self.pool.users):
            raise ValueError(
                f"a prompt of {len(prompt[0])} tokens and max_new_tokens={request.max_new_tokens} "
                f"need {blocks} blocks, the pool has {len(self.pool.users)}"
            )
        check_seed(request.seed, rows=1)
        choose = Chooser(prompt, request.sampler, request.processors, request.seed)
        self.waiting.append(Running(self._submitted, request, choose, len(prompt[0])))
        self._submitted += 1
        return self._submitted - 1

    def run(self) -> Iterator[Step]:
        """Steps until every request has finished. More may be submitted between two steps."""
        while self.waiting or self.running:
            yield self.step()

    def step(self) -> Step:
        """Admit what fits; read a piece of each prompt that is not read yet; then one token for
        each of the others.

        Raises ``ValueError`` where others hold blocks that a request needs.
        """
        done = Step()
        self._admit(done)
        ready = [r for r in self.running if len(r.tokens) - r.row.length == 1]
        for group in ([r for r in self.running if r not in ready], ready):
            group = self._make_room(group, done)
            if group:
                self._forward(group, done)
                self._finish(done)
        done.blocks = len(self.pool.users) - len(self.pool.free)
        return done

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def _piece(self, running: Running) -> list[int]:
        """The tokens of a request that the next pass will run."""
        start = running.row.length
        return running.tokens[start : start + self.prefill_chunk]

    def _admit(self, done: Step) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            running = self.waiting[0]
            found = self._find(running.tokens)
            running.row = Row(
                [self.pool.share(b) for b in found], len(found) * self.pool.block_size
            )
            wanted = self._blocks(len(running.tokens)) - len(found)
            # what the others still have to read, and one block more: none should be put back soon
            promised = [self._blocks(len(r.tokens)) - len(r.row.table) + 1 for r in self.running]
            if self.running and not self._free(wanted + sum(promised)):
                self.pool.cut(running.row, 0)
                return
            self.running.append(self.waiting.popleft())
            if found:
                done.shared[running.number] = running.row.length

    def _make_room(self, group: list[Running], done: Step) -> list[Running]:
        """See that there are blocks for the next pass; the youngest requests may lose theirs. What
        is left of the group, of which some may have been put back for the pass before."""
        while True:
            group = [running for running in group if running in self.running]
            ends = [running.row.length + len(self._piece(running)) for running in group]
            held = sum(len(running.row.table) for running in group)
            wanted = sum(self._blocks(end) for end in ends) - held
            if self._free(wanted):
                return group
            if len(self.running) == 1:
                raise ValueError(
                    f"{wanted} more blocks are needed, {len(self.pool.free)} are free: others than "
                    "this engine hold blocks of its pool"
                )
            youngest = self.running.pop()
            self.pool.cut(youngest.row, 0)
            self.waiting.appendleft(youngest)
            done.put_back.append(youngest.number)

    def _free(self, blocks: int) -> bool:
        """Whether so many blocks can be had. For that, and no further, prefixes that only the
        engine holds are given up."""
        missing = blocks - len(self.pool.free)
        if missing <= 0:
            return True
        unused = [prefix for prefix, b in self.prefixes.items() if self.pool.users[b] == 1]
        if missing > len(unused):
            return False
        for prefix in unused[:missing]:
            self.pool.release(self.prefixes.pop(prefix))
        return True

    def _forward(self, group: list[Running], done: Step) -> None:
        pieces = [self._piece(running) for running in group]
        batch = padded_batch(pieces, pad_token_id=0, side="left")
        assert batch.positions is not None
        starts = torch.tensor([running.row.length for running in group])[:, None]  # (B, 1)
        places = batch.positions + starts
        positions = places.masked_fill(batch.positions == PADDING, PADDING)  # (B, T)
        cache = self.cache_type(self.pool, [running.row for running in group])
        device = self.model.head_weight.device
        logits = prefill(self.model, batch.idx.to(device), positions.to(device), cache)  # (B, V)
        done.passes += 1
        done.places += positions.numel()
        for running, piece, line in zip(group, pieces, logits, strict=True):
            done.fed[running.number] = len(piece)
            if self.share_prefixes:
                self._remember(running, len(piece))
            if running.row.length == len(running.tokens):  # all is read
                try:
                    done.said[running.number] = int(running.choose(line[None]))
                except ValueError as error:  # of this request alone: the others go on
                    self.errors[running.number] = error
                    done.failed.append(running.number)
                    self.running.remove(running)
                    self.pool.cut(running.row, 0)

    def _finish(self, done: Step) -> None:
        """Let go of those that have finished, at once: what is put back must have more to say."""
        for running in [r for r in self.running if r.finished]:
            self.running.remove(running)
            self.pool.cut(running.row, 0)
            self.results[running.number] = running.said
            done.finished.append(running.number)

    def _key(self, tokens: list[int], end: int) -> tuple[int, ...]:
        """What the keys and values of the block that ends before ``end`` depend on: the tokens in
        it, and all before them."""
        return tuple(tokens[:end])

    def _find(self, tokens: list[int]) -> list[int]:
        """The blocks that hold the longest known beginning; one token is always left to run."""
        P, found = self.pool.block_size, []
        for end in range(P, len(tokens), P):
            if self._key(tokens, end) not in self.prefixes:
                break
            found.append(self._key(tokens, end))
        for prefix in reversed(found):  # the last to be given up: what others build on
            self.prefixes[prefix] = self.prefixes.pop(prefix)
        return [self.prefixes[prefix] for prefix in found]

    def _remember(self, running: Running, new: int) -> None:
        """Hold the blocks that ``new`` tokens of a request have filled, for others that begin
        alike."""
        P, end = self.pool.block_size, running.row.length
        for number in range((end - new) // P, end // P):
            prefix = self._key(running.tokens, (number + 1) * P)
            if prefix not in self.prefixes:
                self.prefixes[prefix] = self.pool.share(running.row.table[number])
