"""Many requests at a time, beside transformers' continuous batching and its padded batches.

Thirty-two requests of random prompts and limits, greedy, with at most 8 or 32 of them running. Ours
(laid out for so many rows) and theirs have the same weights and say the same tokens, or there is no
row.

Their continuous batching gets what it needs on a CPU: a pool that holds every running request, none
of it kept free, pages and a budget of tokens for a pass (the best of six pairs that were tried with
8 requests at a time), ``sdpa``, no search for prefixes (there are none to find, and ours does not
search either), and one manager that goes on from run to run. Its defaults size the pool by the
memory of the machine, and are several times slower. Its padded batches get the requests sorted by
limit, so that rows which end together stand together, though a server cannot choose so.
"""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import measure
import torch
from bench_decoding import shapes, twins
from measure import Row, Size

from lm_from_scratch.cache.paged import BlockPool
from lm_from_scratch.checkpoint.architectures import Config
from lm_from_scratch.generation.engine import Engine
from lm_from_scratch.generation.requests import Request
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.instruments.layout import lay_out_
from lm_from_scratch.models.interface import CausalLM

BATCHING, PADDED = "transformers, continuous batching", "transformers, padded batches"
TARGET = 1.4  # over their continuous batching
BLOCK = 16  # slots in a block of ours
PAGE = 128  # in one of theirs
BUDGET = 256  # tokens of a pass of theirs
Load = list[tuple[list[int], int]]  # prompts, and how many tokens are to follow


def load(config: Config, size: Size, n: int = 32) -> Load:
    """Prompts of 16 to 192 tokens that are followed by 8 to 64; tiny ones for the tests."""
    longest, most = (12, 4) if size.smoke else (192, 64)
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    lengths = [(draw(longest // 12, longest), draw(most // 8, most)) for _ in range(n)]
    return [
        (torch.randint(1, config.vocab_size, (length,), generator=generator).tolist(), max(new, 1))
        for length, new in lengths
    ]


def our_run(model: CausalLM, requests: Load, batch: int) -> Callable[[], list[list[int]]]:
    config = model.config
    heads = getattr(config, "n_kv_head", config.n_head)
    most = max(len(prompt) + new for prompt, new in requests)
    blocks = batch * -(-most // BLOCK)
    dtype = model.head.weight.dtype
    pool = BlockPool(config.n_layer, heads, config.head_dim, blocks, BLOCK, dtype)

    def run() -> list[list[int]]:
        engine = Engine(model, pool, max_batch=batch, share_prefixes=False)
        for prompt, new in requests:
            engine.submit(Request(prompt=prompt, max_new_tokens=new, sampler=GREEDY))
        for _ in engine.run():
            pass
        return [engine.results[number] for number in range(len(requests))]

    return run


def their_manager(model: Any, requests: Load, batch: int) -> Any:
    """Their engine, started: it waits for requests in a thread of its own."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    most = max(len(prompt) + new for prompt, new in requests)
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=batch * -(-most // PAGE) + 1, max_batch_tokens=BUDGET,
            max_requests_per_batch=batch, allow_block_sharing=False, safety_margin=0.0,
        ),
    )  # fmt: skip
    manager.start()
    return manager


def their_run(manager: Any, requests: Load) -> Callable[[], list[list[int]]]:
    def run() -> list[list[int]]:
        names = [
            manager.add_request(prompt, max_new_tokens=new, eos_token_id=-1)
            for prompt, new in requests
        ]
        said: dict[str, list[int]] = {}
        while len(said) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                said[result.request_id] = list(result.generated_tokens)
            elif not manager.is_running():
                raise RuntimeError("transformers' continuous batching has stopped: see above")
        return [said[name] for name in names]

    return run


def padded_run(model: Any, requests: Load, batch: int) -> Callable[[], list[list[int]]]:
    """Batches that start and end together, of requests with similar limits."""
    order = sorted(range(len(requests)), key=lambda number: requests[number][1])

    def run() -> list[list[int]]:
        said: dict[int, list[int]] = {}
        for first in range(0, len(order), batch):
            group = order[first : first + batch]
            longest = max(len(requests[number][0]) for number in group)
            most = max(requests[number][1] for number in group)
            idx = torch.zeros(len(group), longest, dtype=torch.long)
            mask = torch.zeros_like(idx)
            for row, number in enumerate(group):
                prompt = requests[number][0]
                idx[row, longest - len(prompt) :] = torch.tensor(prompt)
                mask[row, longest - len(prompt) :] = 1
            out = model.generate(
                idx, attention_mask=mask, max_new_tokens=most, min_new_tokens=most,
                do_sample=False, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
            for row, number in enumerate(group):
                said[number] = out[row, longest : longest + requests[number][1]].tolist()
        return [said[number] for number in range(len(requests))]

    return run


def rows(size: Size) -> Iterator[Row]:
    for shape, config in list(shapes(size).items())[:1]:
        ours, theirs = twins(config, torch.float32)
        requests = load(config, size)
        tokens = sum(new for _, new in requests)
        for batch in (8, 32):
            title = f"{shape}, float32, 32 requests, at most {batch} at a time"
            lay_out_(ours, batch)
            manager = their_manager(theirs, requests, batch)
            runs = {
                "ours": our_run(ours, requests, batch),
                BATCHING: their_run(manager, requests),
                PADDED: padded_run(theirs, requests, batch),
            }
            try:
                said = {kind: run() for kind, run in runs.items()}  # this warms up, too
                if any(rows != said["ours"] for rows in said.values()):
                    raise RuntimeError(f"{title}: ours and theirs say different tokens")
                times = measure.in_turns(runs, size.rounds, warm_up=False, title=title)
            finally:
                manager.stop(block=True)
                manager.destroy()
            target = None if size.smoke else TARGET
            yield times.row(title, "ours", BATCHING, tokens=tokens, target=target)
            yield times.row(title, "ours", PADDED, tokens=tokens)
            gc.collect()
