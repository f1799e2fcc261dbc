"""Continuous batching: requests join and leave a running batch.

A batch that starts and ends together wastes most of its rows: the short answers wait for the
longest. An engine decides anew at every step which requests it runs. Four ideas make that cheap:

* prompts are read in pieces, so that a long one does not hold up the others, and pieces of similar
  length together, so that few places of a pass are padding;
* rows live in a paged cache (:mod:`lm_from_scratch.cache.paged`), so a request needs no memory of
  a fixed length, and gives its blocks back the moment it ends;
* requests that begin alike share blocks: the tokens in a full block, and the block before it, are
  looked up, and found blocks are not computed again;
* where the pool runs out, the youngest request gives its blocks back and waits. Nothing is lost:
  its tokens are read again later.

What a request says is what it would say alone, up to rounding. A step is made of parts that happen
as a whole: what interrupts one (Ctrl-C, memory that runs out) takes it back, and the next step goes
on from there.

Sources: Yu et al., *Orca: A Distributed Serving System for Transformer-Based Generative Models*,
2022 (batches that change at every step); Kwon et al., 2023, arXiv:2309.06180 (paged memory).
"""

import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import wraps
from typing import Any

import torch

from lm_from_scratch.attention.visibility import PADDING
from lm_from_scratch.cache.paged import BlockPool, PagedCache, Row
from lm_from_scratch.generation.generate import Chooser, check_prompts, check_seed, prefill
from lm_from_scratch.generation.requests import Prefix, Request, Running, Step
from lm_from_scratch.limits import Count, require
from lm_from_scratch.models.blocks import check_no_states
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.text.batch import padded_batch

#: What a pass over prompts costs besides its places, in places: the weights are read once more.
#: From 16 to 64 it makes no difference.
PASS = 32


class Snapshot:
    """What an engine was, to go back to."""

    def __init__(self, engine: "Engine") -> None:
        self.users, self.free = list(engine.pool.users), list(engine.pool.free)
        self.waiting, self.running = list(engine.waiting), list(engine.running)
        self.rows = [(list(r.row.table), r.row.length, r.prefix) for r in self.running]
        self.marks = [running.choose.mark() for running in self.running]
        self.prefixes = dict(engine.prefixes)
        self.step, self.groups = deepcopy(engine._step), engine._groups

    def restore(self, engine: "Engine") -> None:
        """Go back. Done once more where this, too, was interrupted."""
        engine.pool.users[:], engine.pool.free[:] = self.users, self.free
        for running in self.waiting:
            running.row = Row()
        for running, (table, length, prefix) in zip(self.running, self.rows, strict=True):
            running.row, running.prefix = Row(list(table), length), prefix
        for running, mark in zip(self.running, self.marks, strict=True):
            running.choose.back_to(mark)
            engine.results.pop(running.number, None)
            engine.errors.pop(running.number, None)
        engine.waiting, engine.running = deque(self.waiting), list(self.running)
        engine.prefixes = dict(self.prefixes)
        engine._step, engine._groups = deepcopy(self.step), self.groups


def atomic(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an engine that does all that it does, or nothing.

    Between two of them memory may change owner. Within one, no block is written into that another
    has given back: what it held is there when the owner comes back.
    """

    @wraps(method)
    def run(engine: "Engine", *args: Any) -> Any:
        engine._take_back()
        try:
            engine._snapshot = Snapshot(engine)
            result = method(engine, *args)
            engine._snapshot = None
            return result
        except BaseException:
            engine._take_back()
            raise

    return run


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out. For that of a CPU, torch has no class of its own."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


def computed_dtype(model: CausalLM) -> torch.dtype:
    """In what keys and values are computed: under autocast not the dtype of the weights."""
    weight = model.head.weight
    if torch.is_autocast_enabled(weight.device.type) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype


class Engine:
    """Runs requests over one pool, at most ``max_batch`` at a time.

    A prompt is read in pieces of at most ``prefill_chunk`` tokens, one a step. Smaller ones let the
    others wait less for their next token, and read the weights more often. With ``share_prefixes``
    full blocks stay in the pool after their request has ended, until the memory is needed, or the
    weights have changed and :meth:`forget` is called. Under autocast, the pool has its dtype.
    Nothing runs until the steps are asked for::

        number = engine.submit(Request(prompt=ids, max_new_tokens=50))
        for step in engine.run():
            ...
        engine.results[number]  # or engine.errors[number]

    A request whose token cannot be chosen, for whatever exception of its processors, ends alone.
    Everything else, as Ctrl-C or memory that runs out, leaves the engine between two parts of a
    step: ``run`` goes on from there, with the tokens that it would have said. (A processor leaves
    the engine alone.)
    """

    def __init__(
        self,
        model: CausalLM,
        pool: BlockPool,
        max_batch: int = 16,
        prefill_chunk: int = 64,
        share_prefixes: bool = True,
        cache_type: type[PagedCache] = PagedCache,
    ) -> None:
        require(Count, max_batch=max_batch, prefill_chunk=prefill_chunk)
        require(BlockPool, pool=pool)
        check_no_states(model, "continuous batching over shared blocks")
        config = model.config
        wanted = (len(config.windows), *config.kv_shape, computed_dtype(model))
        given = (len(pool.keys), *pool.keys.shape[2:], pool.values.shape[3], pool.keys.dtype)
        if wanted != given:
            raise ValueError(
                f"the pool is for (layers, key heads, D, Dv, dtype) = {given}, the model has "
                f"{wanted}"
            )
        self.model, self.pool = model, pool
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk
        self.share_prefixes, self.cache_type = share_prefixes, cache_type
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []  # the oldest first
        self.results: dict[int, list[int]] = {}  # what finished requests said
        self.errors: dict[int, Exception] = {}  # why failed ones could not go on
        self.prefixes: dict[tuple[int, tuple[int, ...]], Prefix] = {}  # the least used first
        self._submitted = self._remembered = 0
        self._step: Step | None = None  # one that has begun
        self._groups: list[list[Running]] = []  # what is left of it to run
        self._snapshot: Snapshot | None = None  # a part of it that has begun

    def submit(self, request: Request) -> int:
        """Put a request into the queue; its number.

        Raises ``ValueError`` for a prompt that the model or the pool cannot hold.
        """
        require(Request, request=request)
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
        self._take_back()
        number, self._submitted = self._submitted, self._submitted + 1
        self.waiting.append(Running(number, request, choose, len(prompt[0])))
        return number

    @atomic
    def cancel(self, number: int) -> list[int]:
        """Let go of a request, and of its blocks; what it has said so far.

        Raises ``ValueError`` if it is not in the engine.
        """
        for requests in (self.waiting, self.running):
            for running in requests:
                if running.number == number:
                    requests.remove(running)
                    self._let_go(running)
                    return running.new_tokens
        raise ValueError(f"request {number} is not in the engine: it has ended, or was never there")

    @atomic
    def forget(self) -> None:
        """Give up what is remembered of prompts. Where the weights of the model change between two
        requests, it was computed by the old ones."""
        for prefix in self.prefixes.values():
            self.pool.release(prefix.block)
        self.prefixes.clear()

    def run(self) -> Iterator[Step]:
        """Steps until every request has finished. More may be submitted between two steps."""
        self._take_back()
        while self._step or self.waiting or self.running:
            yield self.step()

    def step(self) -> Step:
        """Admit what fits; read a piece of each prompt that is not read yet; then one token for
        each of the others. A step that was interrupted goes on.

        Raises ``ValueError`` where others hold blocks that a request needs.
        """
        self._take_back()
        if self._step is None:
            self._begin()
        while self._groups:
            self._run()
        assert self._step is not None
        for number in self._step.failed:  # what the model said is not kept for the traceback
            traceback.clear_frames(self.errors[number].__traceback__)
        self._step.blocks = len(self.pool.users) - len(self.pool.free)
        done, self._step = self._step, None
        return done

    @atomic
    def _begin(self) -> None:
        self._step = Step()
        self._admit(self._step)
        ready = [r for r in self.running if len(r.tokens) - r.row.length == 1]
        reading = [r for r in self.running if r not in ready]
        self._groups = self._alike(reading) + ([ready] if ready else [])
        self._make_room(self._step)

    @atomic
    def _run(self) -> None:
        group, *self._groups = self._groups
        assert self._step is not None
        if group:
            self._forward(group, self._step)
            self._finish(self._step)
        self._make_room(self._step)  # now: nothing more is written into blocks in this part

    def _alike(self, reading: list[Running]) -> list[list[Running]]:
        """The prompts in groups, of which padding takes at most ``PASS`` places each. Every one of
        them reads its piece in this step, the long pieces first."""
        groups: list[list[Running]] = []
        longest = padding = 0
        for running in sorted(reading, key=lambda r: -len(self._piece(r))):
            padding += longest - len(self._piece(running))
            if not groups or padding > PASS:
                longest, padding = len(self._piece(running)), 0
                groups.append([])
            groups[-1].append(running)
        return groups

    def _take_back(self) -> None:
        """A part that was interrupted has never begun."""
        if self._snapshot is not None:
            self._snapshot.restore(self)
            self._snapshot = None

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def _piece(self, running: Running) -> list[int]:
        """The tokens of a request that the next pass will run."""
        start = running.row.length
        return running.tokens[start : start + self.prefill_chunk]

    def _admit(self, done: Step) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            running = self.waiting[0]
            prefixes = self._use(running.tokens)
            running.row = Row(
                [self.pool.share(prefix.block) for prefix in prefixes],
                len(prefixes) * self.pool.block_size,
            )
            running.prefix = prefixes[-1].number if prefixes else 0
            wanted = self._blocks(len(running.tokens)) - len(prefixes)
            # what the others still have to read, and one block more: none should be put back soon
            promised = [self._blocks(len(r.tokens)) - len(r.row.table) + 1 for r in self.running]
            if self.running and not self._free(wanted + sum(promised)):
                self.pool.cut(running.row, 0)
                return
            self.running.append(self.waiting.popleft())
            if prefixes:
                done.shared[running.number] = running.row.length

    def _make_room(self, done: Step) -> None:
        """See that there are blocks for the next group, if there is one; the youngest requests may
        lose theirs, also those of the group, of which some may have been put back for the pass
        before."""
        while self._groups:
            group = [running for running in self._groups[0] if running in self.running]
            ends = [running.row.length + len(self._piece(running)) for running in group]
            held = sum(len(running.row.table) for running in group)
            wanted = sum(self._blocks(end) for end in ends) - held
            if self._free(wanted):
                self._groups = [group, *self._groups[1:]]
                return
            if len(self.running) == 1:
                raise ValueError(
                    f"{wanted} more blocks are needed, {len(self.pool.free)} are free: others than "
                    "this engine hold blocks of its pool"
                )
            youngest = self.running.pop()
            self._let_go(youngest)
            self.waiting.appendleft(youngest)
            done.put_back.append(youngest.number)

    def _free(self, blocks: int) -> bool:
        """Whether so many blocks can be had. For that, and no further, prefixes that only the
        engine holds are given up."""
        missing = blocks - len(self.pool.free)
        if missing <= 0:
            return True
        unused = [key for key, p in self.prefixes.items() if self.pool.users[p.block] == 1]
        if missing > len(unused):
            return False
        for key in unused[:missing]:
            self.pool.release(self.prefixes.pop(key).block)
        return True

    def _forward(self, group: list[Running], done: Step) -> None:
        pieces = [self._piece(running) for running in group]
        batch = padded_batch(pieces, pad_token_id=0, side="left")
        assert batch.positions is not None
        starts = torch.tensor([running.row.length for running in group])[:, None]  # (B, 1)
        places = batch.positions + starts
        positions = places.masked_fill(batch.positions == PADDING, PADDING)  # (B, T)
        cache = self.cache_type(self.pool, [running.row for running in group])
        device = self.model.head.weight.device
        idx, positions = batch.idx.to(device), positions.to(device)
        logits = prefill(self.model, idx, cache, positions=positions)  # (B, V)
        done.passes += 1
        done.places += positions.numel()
        for running, piece in zip(group, pieces, strict=True):
            done.fed[running.number] = len(piece)
            if self.share_prefixes:
                self._remember(running, len(piece))
        for running, line in zip(group, logits, strict=True):
            if running.row.length == len(running.tokens):  # all is read
                try:
                    done.tokens[running.number] = int(running.choose(line[None]))
                except Exception as error:  # of this request alone: the others go on
                    if is_out_of_memory(error):
                        raise
                    self.errors[running.number] = error
                    done.failed.append(running.number)
                    self.running.remove(running)
                    self._let_go(running)

    def _let_go(self, running: Running) -> None:
        """Give its blocks back. Those that stay as prefixes were used last by it."""
        self.pool.cut(running.row, 0)
        self._use(running.tokens)

    def _finish(self, done: Step) -> None:
        """Let go of those that have finished, at once: what is put back must have more to say."""
        for running in [r for r in self.running if r.finished]:
            self.running.remove(running)
            self._let_go(running)
            self.results[running.number] = running.new_tokens
            done.finished.append(running.number)

    def _key(self, before: int, tokens: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """What the keys and values of a block depend on: the ``tokens`` in it, and all before them,
        for which the number of their prefix stands."""
        return before, tuple(tokens)

    def _find(self, tokens: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        """The keys of the longest known beginning; one token is always left to run."""
        P, number, keys = self.pool.block_size, 0, []
        for end in range(P, len(tokens), P):
            key = self._key(number, tokens[end - P : end])
            if key not in self.prefixes:
                break
            keys.append(key)
            number = self.prefixes[key].number
        return keys

    def _use(self, tokens: list[int]) -> list[Prefix]:
        """The blocks that hold the longest known beginning. They are now the last to be given up,
        and of them the last the first, on which the others build."""
        keys = self._find(tokens)
        for key in reversed(keys):
            self.prefixes[key] = self.prefixes.pop(key)
        return [self.prefixes[key] for key in keys]

    def _remember(self, running: Running, new: int) -> None:
        """Hold the blocks that ``new`` tokens of a request have filled, for others that begin
        alike."""
        P, end = self.pool.block_size, running.row.length
        for i in range((end - new) // P, end // P):
            key = self._key(running.prefix, running.tokens[i * P : (i + 1) * P])
            if key not in self.prefixes:
                self._remembered += 1
                block = self.pool.share(running.row.table[i])
                self.prefixes[key] = Prefix(self._remembered, block)
            running.prefix = self.prefixes[key].number
