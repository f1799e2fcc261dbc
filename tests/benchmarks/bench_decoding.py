"""Decoding beside transformers and other engines, and beside the limit that memory sets; the wait
for the first token; cost as the context grows.

One token reads every weight once, so no step can be faster than the bytes of the weights divided by
the bandwidth of memory. A *step* is one token with a filled cache, the model alone; *generating* is
all of it, with the prompt and the choice of each token. Ours and theirs have the same random
weights. Equal greedy tokens are expected in float32; in bfloat16 a near-tie may part them.

The first token waits until the prompt is read, which is arithmetic, not memory: every weight is
used for all tokens of the prompt. Measured as everything else here, for long prompts.

The last benchmark measures one token at several lengths of the context, for each cache, between
two moments at which a growing one doubles. What a cache holds does not change its time, so it is
filled with random numbers.
"""

import contextlib
import copy
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import measure
import peers
import torch
from measure import Row, Size

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.slots import cache_for
from lm_from_scratch.checkpoint.architectures import Config, build
from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.generation.generate import decode, generate, prefill
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.instruments.layout import LAYOUTS, lay_out_
from lm_from_scratch.instruments.onednn import multiplies
from lm_from_scratch.interop.caches import from_legacy, to_transformers
from lm_from_scratch.models.gpt2 import SIZES, GPT2Config
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.models.qwen2 import SIZES as QWEN2_SIZES
from lm_from_scratch.models.qwen2 import Qwen2Config
from lm_from_scratch.weights.quantize import quantize_

#: Every layout by its name, and the one that is chosen by measuring, as a newcomer runs it.
KINDS: dict[str, Sequence[str]] = {
    "ours": LAYOUTS,
    **{f"ours, {layout}": (layout,) for layout in LAYOUTS},
}
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
#: What the page's first sentence tells of.
HEADLINES = {"float32": "in generating in float32", "bfloat16": "in generating in bfloat16"}
THEIRS = peers.TRANSFORMERS
#: Of generating, as a newcomer runs it, over transformers: shape, dtype, rows.
TARGETS = {
    ("10 M parameters", "float32", 1): 1.65,
    ("GPT-2 small", "float32", 1): 1.25,
    ("GPT-2 small", "float32", 8): 1.9,
    ("GPT-2 small", "bfloat16", 1): 1.9,
    ("GPT-2 small", "bfloat16", 8): 1.7,
    ("GPT-2 small", "int8", 1): 2.5,
    ("GPT-2 small", "int8", 8): 3.3,
    ("Qwen2-0.5B", "float32", 1): 1.35,
    ("Qwen2-0.5B", "float32", 8): 1.9,
    ("Qwen2-0.5B", "bfloat16", 1): 1.55,
    ("Qwen2-0.5B", "bfloat16", 8): 1.45,
}
#: Of a step, of the limit.
SHARES = {
    ("GPT-2 small", "float32", 1): 0.6,
    ("Qwen2-0.5B", "float32", 1): 0.72,
    ("Qwen2-0.5B", "bfloat16", 1): 0.8,
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
    greedy = Sampler(temperature=0.0)
    return lambda: torch.tensor([*generate(model, idx, n, greedy)]).T  # (B, n)


def our_step(model: CausalLM, idx: torch.Tensor, n: int, rounds: int) -> Callable[[], None]:
    """``n`` tokens after a prompt, one at a time."""
    cache = cache_for(model.config.windows, reserve=idx.shape[1] + n * rounds)
    prefill(model, idx, cache)

    def run() -> None:
        for _ in range(n):
            decode(model, idx[:, -1], cache)

    return run


def kinds_of(dtype: torch.dtype) -> dict[str, Sequence[str]]:
    """The layouts by name. In bfloat16 torch reads columns ten times slower: not measured."""
    slow = "ours, columns" if dtype == torch.bfloat16 else ""
    return {kind: layouts for kind, layouts in KINDS.items() if kind != slow}


def laid_out(model: CausalLM, rows: int) -> dict[str, tuple[CausalLM, str]]:
    """The model as a newcomer runs it, and with each layout that its weights can have here, with
    what to note."""
    kinds = {}
    for kind, layouts in kinds_of(model.head.weight.dtype).items():
        copied = copy.deepcopy(model)
        with contextlib.suppress(ValueError):  # oneDNN packs no bfloat16 on this processor
            choice = lay_out_(copied, rows, layouts)
            kinds[kind] = copied, str(choice) if kind == "ours" else ""
    return kinds


def weight_bytes(model: CausalLM) -> int:
    """Bytes that one token reads: every matrix, but of a table that is only looked up, a row."""
    looked_up = [
        module.weight
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) and module.weight is not model.head.weight
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
                where = shape, dtype, batch
                if batch > 1 and not multiplies(getattr(torch, dtype)):  # minutes
                    title = f"{shape}, {dtype}, batch {batch}, a token"
                    yield measure.absent(title, "ours", THEIRS, "tokens/s")
                    continue
                kinds = laid_out(ours, batch)
                yield from steps(where, kinds, theirs, size)
                yield from generating(where, kinds["ours"], theirs, size)
                del kinds
            if dtype == "float32" and shape in ("GPT-2 small", "smoke"):
                yield from in_int8(shape, ours, theirs, size)
            del ours, theirs


Where = tuple[str, str, int]  # shape, dtype, rows


def steps(
    where: Where, kinds: dict[str, tuple[CausalLM, str]], theirs: Any, size: Size
) -> Iterator[Row]:
    """One token with a filled cache, for every layout of the weights."""
    shape, dtype, batch = where
    title = f"{shape}, {dtype}, batch {batch}, a token"
    ours = kinds["ours, rows"][0]
    idx = prompt(ours.config, batch)
    n, rounds = 2 if size.smoke else 4 if "0.5B" in shape else 8, size.rows(3) + 2
    runs = {kind: our_step(model, idx, n, rounds + 1) for kind, (model, _) in kinds.items()}
    runs[THEIRS] = peers.transformers_step(theirs, idx, n)
    times = measure.in_turns(runs, rounds, {"bandwidth": measure.bandwidth(size)}, title=title)
    for kind, (_, note) in kinds.items():
        yield times.row(
            title, kind, THEIRS, tokens=batch * n, limit="bandwidth", work=weight_bytes(ours) * n,
            target_share=SHARES.get(where) if kind == "ours" else None, note=note,
        )  # fmt: skip
    for kind in [kind for kind in kinds_of(getattr(torch, dtype)) if kind not in kinds]:
        yield measure.absent(title, kind, THEIRS, "tokens/s")


def generating(where: Where, kind: tuple[CausalLM, str], theirs: Any, size: Size) -> Iterator[Row]:
    """Prompt and new tokens, beside transformers and, for GPT-2 small, engines made for a CPU."""
    shape, dtype, batch = where
    model, note = kind
    idx, n = prompt(model.config, batch), length(shape, batch, size)
    title = f"{shape}, {dtype}, batch {batch}, {PROMPT} + {n} tokens"
    runs = {"ours": our_run(model, idx, n), THEIRS: peers.transformers_run(theirs, idx, n)}
    absent: list[str] = []
    if dtype == "float32" and shape in ("GPT-2 small", "smoke"):
        if size.name != "quick":  # a minute to compile
            backend = "eager" if size.smoke else "inductor"
            runs[peers.STATIC] = peers.compiled_run(theirs, idx, n, backend)
        absent = peers.add_engines(runs, theirs, idx, n, dtype)
    yield from against(title, "ours", runs, absent, batch * n, size, {
        THEIRS: dict(target=TARGETS.get(where), headline=HEADLINES[dtype], note=note),
    })  # fmt: skip


def in_int8(shape: str, ours: CausalLM, theirs: Any, size: Size) -> Iterator[Row]:
    """Weights and activations of 8 bits, beside engines that have them, too."""
    model = copy.deepcopy(ours)
    quantize_(model, bits=8)
    for batch in (1, 8):
        idx, n = prompt(model.config, batch), length(shape, batch, size)
        title = f"{shape}, int8, batch {batch}, {PROMPT} + {n} tokens"
        fp32 = f"{THEIRS} fp32"
        runs = {"ours": our_run(model, idx, n), fp32: peers.transformers_run(theirs, idx, n)}
        absent = peers.add_engines(runs, theirs, idx, n, "int8")
        if not (measure.APART / "torchao").is_dir():
            absent.append(peers.TORCHAO)
        else:
            runs[peers.TORCHAO] = our_run(peers.torchao_model(ours), idx, n)
        target = TARGETS.get((shape, "int8", batch))
        yield from against(title, "ours", runs, absent, batch * n, size, {fp32: {"target": target}})


def against(
    title: str, kind: str, runs: dict[str, Callable[[], torch.Tensor]], absent: list[str],
    tokens: int | None, size: Size, more: dict[str, dict[str, Any]],
) -> Iterator[Row]:  # fmt: skip
    """A row beside each peer. Greedy tokens are those of the peer, but for near-ties."""
    said = {name: run() for name, run in runs.items()}  # which warms up, too
    times = measure.in_turns(runs, size.rows(3), warm_up=False, title=title)
    for peer in [name for name in runs if name != kind]:
        same = (said[kind] == said[peer]).float().mean().item()
        found = dict(more.get(peer, {}))
        notes = [found.pop("note", ""), f"greedy tokens: {same:.0%} equal"]
        note = "; ".join(filter(None, notes))
        yield times.row(title, kind, peer, tokens=tokens, note=note, **found)
    for peer in absent:
        unit = "ms" if tokens is None else "tokens/s"
        yield measure.absent(title, kind, peer, unit, "not installed")


def length(shape: str, batch: int, size: Size) -> int:
    """How many new tokens, so that a run takes seconds."""
    if size.smoke:
        return 4
    return 128 if batch == 1 and shape.startswith("10 M") and not size.quick else 32


def first_token(size: Size) -> Iterator[Row]:
    """Milliseconds from a long prompt to the first token after it."""
    shape = "smoke" if size.smoke else "GPT-2 small"
    ours, theirs = twins(shapes(size)[shape], torch.float32)
    models = {"float32": copy.deepcopy(ours), "int8": ours}
    note = str(lay_out_(models["float32"]))
    quantize_(models["int8"], bits=8)
    for dtype, model in models.items():
        for length in (16, 32) if size.smoke else (512, 2048):
            idx = prompt(model.config, 1, length)
            fp32 = THEIRS if dtype == "float32" else f"{THEIRS} fp32"
            runs = {"ours": our_run(model, idx, 1), fp32: peers.transformers_run(theirs, idx, 1)}
            absent = peers.add_engines(runs, theirs, idx, 1, dtype)
            title = f"{shape}, {dtype}, a prompt of {length} tokens"
            more = {fp32: dict(note=note if dtype == "float32" else "")}
            yield from against(title, "ours", runs, absent, None, size, more)


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
