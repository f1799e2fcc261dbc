"""Decoding beside transformers, and beside the limit that memory sets; cost as the context grows.

One token reads every weight once, so no step can be faster than the bytes of the weights divided by
the bandwidth of a large matrix-vector product. Ours and theirs have the same random weights. A run
reads its prompt, too, so the share of the limit is a little more than what is shown. Equal greedy
tokens are expected in float32; in bfloat16 a near-tie may part them.

The second benchmark measures one token at several lengths of the context, for each cache, between
two moments at which a growing one doubles. What a cache holds does not change its time, so it is
filled with random numbers.
"""

import copy
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import measure
import torch
from measure import Row, Size

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.slots import cache_for
from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.generation.generate import decode, prefill
from lm_from_scratch.instruments.onednn import multiplies, use_packed_weights_
from lm_from_scratch.interop.caches import from_legacy, to_transformers
from lm_from_scratch.models.causal_lm import CausalLM, Config, build
from lm_from_scratch.models.gpt2 import SIZES, GPT2Config
from lm_from_scratch.models.qwen2 import SIZES as QWEN2_SIZES
from lm_from_scratch.models.qwen2 import Qwen2Config

SHAPES: dict[str, Config] = {
    "10 M parameters": GPT2Config(
        vocab_size=8192, block_size=2304, n_layer=10, n_head=8, n_embd=256, bos_token_id=0,
        eos_token_id=0,
    ),
    "GPT-2 small": GPT2Config(block_size=2304, **SIZES["gpt2"]),
    "Qwen2-0.5B": Qwen2Config(
        block_size=2304, eos_token_id=None, **QWEN2_SIZES["Qwen2-0.5B"]  # type: ignore[arg-type]
    ),
}  # fmt: skip
PROMPT = 64
#: What the page's first sentence tells of: by dtype and kind.
HEADLINES = {
    ("float32", "ours"): "in decoding in float32",
    ("bfloat16", "ours, packed"): "in decoding in bfloat16 with packed weights",
}
THEIRS = "transformers"
#: Over transformers, and share of the limit: shape, dtype, rows, kind.
TARGETS: dict[tuple[str, str, int, str], tuple[float, float | None]] = {
    ("10 M parameters", "float32", 1, "ours"): (1.65, None),
    ("GPT-2 small", "float32", 1, "ours, packed"): (1.15, 0.9),
    ("GPT-2 small", "float32", 8, "ours, packed"): (1.9, None),
    ("GPT-2 small", "bfloat16", 1, "ours, packed"): (1.9, None),
    ("GPT-2 small", "bfloat16", 8, "ours, packed"): (1.7, None),
    ("Qwen2-0.5B", "float32", 1, "ours, packed"): (1.08, 0.9),
    ("Qwen2-0.5B", "float32", 8, "ours, packed"): (1.9, None),
    ("Qwen2-0.5B", "bfloat16", 1, "ours, packed"): (1.55, 0.8),
    ("Qwen2-0.5B", "bfloat16", 8, "ours, packed"): (1.45, None),
}


def shapes(size: Size) -> dict[str, Config]:
    """Those of a run: all; without the largest to try; one tiny model for the tests."""
    if size.smoke:
        tiny = dict(vocab_size=96, n_layer=2, n_head=2, n_embd=64, bos_token_id=0, eos_token_id=0)
        return {"smoke": dataclasses.replace(SHAPES["GPT-2 small"], **tiny)}
    return {name: SHAPES[name] for name in list(SHAPES)[: 2 if size.quick else None]}


def twins(config: Config, dtype: torch.dtype) -> tuple[CausalLM, Any]:
    """Our model and theirs, read from the same file: where weights lie in memory matters, too."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(build(config).to(dtype), f"{folder}/model")
        auto = transformers.AutoModelForCausalLM
        theirs = auto.from_pretrained(f"{folder}/model", dtype=dtype).eval()
        return from_pretrained(f"{folder}/model"), theirs


def our_run(model: CausalLM, idx: torch.Tensor, n: int) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        cache = cache_for(model.config.windows, reserve=idx.shape[1] + n)
        tokens = prefill(model, idx, cache).argmax(-1)
        said = [tokens]
        for _ in range(n - 1):
            tokens = decode(model, tokens, cache).argmax(-1)
            said.append(tokens)
        return torch.stack(said, 1)

    return run


def their_run(model, idx: torch.Tensor, n: int) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        out = model.generate(
            idx, attention_mask=torch.ones_like(idx), max_new_tokens=n, min_new_tokens=n,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return out[:, idx.shape[1] :]

    return run


def weight_bytes(model: CausalLM) -> int:
    """Bytes that one token reads: every matrix, but of a table that is only looked up, a row."""
    looked_up = [
        module.weight
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) and module.weight is not model.head_weight
    ]
    return sum(p.nbytes for p in model.parameters() if all(p is not t for t in looked_up))


def prompt(config: Config, batch: int, length: int = PROMPT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, config.vocab_size, (batch, length), generator=generator)


def rows(size: Size) -> Iterator[Row]:
    for shape, config in shapes(size).items():
        for dtype in ("float32", "bfloat16"):
            ours, theirs = twins(config, getattr(torch, dtype))
            for batch in (1, 8):
                n = 4 if size.smoke else 16 if shape == "Qwen2-0.5B" or batch > 1 else 32
                idx = prompt(config, batch)
                runs: dict[str, Callable[[], torch.Tensor]] = {
                    THEIRS: their_run(theirs, idx, n),
                    "ours": our_run(ours, idx, n),
                }
                if multiplies(ours.head_weight.dtype):
                    packed = copy.deepcopy(ours)
                    use_packed_weights_(packed, rows=batch)
                    runs["ours, packed"] = our_run(packed, idx, n)
                texts = {kind: run() for kind, run in runs.items()}  # which warms up, too
                title = f"{shape}, {dtype}, batch {batch}"
                limits = {"bandwidth": measure.bandwidth(size)}
                times = measure.in_turns(runs, size.rows(3), limits, warm_up=False, title=title)
                for kind in list(runs)[1:]:
                    same = torch.equal(texts[kind], texts[THEIRS])
                    target, share = TARGETS.get((shape, dtype, batch, kind), (None, None))
                    yield times.row(
                        title, kind, THEIRS, tokens=batch * n, limit="bandwidth",
                        work=weight_bytes(ours) * n, target=target, target_share=share,
                        note=f"greedy tokens {'equal' if same else 'part at a near-tie'}",
                        headline=HEADLINES.get((dtype, kind), ""),
                    )  # fmt: skip
                if "ours, packed" not in runs:
                    yield measure.absent(title, "ours, packed", THEIRS, "tokens/s")


def filled(config: Config, batch: int, length: int, reserve: int = 0) -> GrowingCache:
    """A cache with ``length`` random columns."""
    heads = getattr(config, "n_kv_head", config.n_head)
    shape = (batch, heads, length, config.n_embd // config.n_head)
    pairs = [(torch.randn(shape), torch.randn(shape)) for _ in range(config.n_layer)]
    cache = GrowingCache(config.n_layer, reserve=reserve)
    from_legacy(pairs, into=cache)
    return cache


def context(size: Size) -> Iterator[Row]:
    """Milliseconds of one token after so many others, for every way to remember them."""
    ((shape, config),) = list(shapes(size).items())[-1:] if size.quick else [
        ("GPT-2 small", SHAPES["GPT-2 small"])
    ]  # fmt: skip
    ours, theirs = twins(config, torch.float32)
    lengths = (16, 32) if size.smoke else (256, 2048) if size.quick else (256, 512, 1024, 2048)
    steps: dict[tuple[int, int], dict[str, float]] = {}
    for batch in (1, 8):
        for length in lengths:
            idx = prompt(config, batch, length)
            caches = {
                "growing": filled(config, batch, length),
                "preallocated": filled(config, batch, length, reserve=length + 64),
            }
            past = to_transformers(caches["growing"])
            runs: dict[str, Callable[[], object]] = {
                kind: lambda cache=cache, token=idx[:, -1]: decode(ours, token, cache)
                for kind, cache in caches.items()
            }

            @torch.no_grad()
            def step(past: Any = past, token: torch.Tensor = idx[:, -1:]) -> None:
                theirs(token, past_key_values=past)

            runs[THEIRS] = step
            title = f"{shape}, token {length + 1}, batch {batch}"
            times = measure.in_turns(runs, size.rounds + 2, title=title)
            for kind in caches:
                target = None
                if (length, kind) == (2048, "preallocated"):
                    target = {1: 1.6, 8: 3.5}[batch]
                headline = "for a token after 2048 others" if length == 2048 else ""
                yield times.row(title, kind, THEIRS, target=target, headline=headline)
            steps[batch, length] = {k: min(seconds) for k, seconds in times.seconds.items()}
            if batch == 1:  # everything again, for one token
                every = torch.no_grad()(lambda idx=idx: ours(idx, keep=slice(-1, None)))
                runs = {"no cache": every, "preallocated": runs["preallocated"]}
                times = measure.in_turns(runs, size.rows(2), title=title)
                target = 50.0 if length == 2048 else None
                yield times.row(title, "preallocated", "no cache", target=target)
    for batch in (1, 8):  # how much dearer a token gets, against how much dearer theirs gets
        first, last = (steps[batch, length] for length in (lengths[0], lengths[-1]))
        growth = {kind: [last[kind] / first[kind]] for kind in first}
        title = f"{shape}, token {lengths[-1] + 1} over token {lengths[0] + 1}, batch {batch}"
        ours, theirs = growth["preallocated"], growth[THEIRS]
        yield measure.compare(title, "preallocated", THEIRS, "times", ours, theirs)
        if batch == 1:
            yield measure.compare(
                title, "preallocated", measure.AIM, "times", ours, [1.3], target=1.0
            )
