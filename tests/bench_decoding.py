"""Decoding beside transformers, and beside the limit that memory sets: ``make bench``.

One token reads every weight once, so no step can be faster than the bytes of the weights divided by
the bandwidth, which is measured in the same run as a large matrix-vector product. Ours and theirs
have the same random weights and take turns, so that a slow moment of the machine meets both. A
round's ratio compares neighbours; the table gives the median, and the smallest and largest ratio.
A run reads its prompt, too, so the share of the limit is a little more than what is printed. Equal
greedy tokens are expected in float32; in bfloat16 a near-tie may part them.

The second part measures the time of one token at several lengths of the context, for each cache,
between two moments at which a growing one doubles.
"""

import argparse
import copy
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lm_from_scratch.cache import GrowingCache, StaticCache, cache_for
from lm_from_scratch.checkpoint import from_pretrained, save_pretrained
from lm_from_scratch.generate import decode, prefill
from lm_from_scratch.models import CausalLM, Config, build
from lm_from_scratch.models.gpt2 import SIZES, GPT2Config
from lm_from_scratch.models.qwen2 import Qwen2Config
from lm_from_scratch.onednn import use_packed_weights_

SHAPES: dict[str, Config] = {
    "10 M parameters": GPT2Config(
        vocab_size=8192,
        block_size=2304,
        n_layer=10,
        n_head=8,
        n_embd=256,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "GPT-2 small": GPT2Config(block_size=2304, **SIZES["gpt2"]),
    "Qwen2-0.5B": Qwen2Config(block_size=2304, eos_token_id=None),
}
#: The shapes whose cost is followed as the context grows.
CONTEXTS: dict[str, Config] = {
    "GPT-2 small": SHAPES["GPT-2 small"],
    "Qwen2 of that size, W = 256": Qwen2Config(
        vocab_size=50257, block_size=2304, n_layer=12, n_head=12, n_kv_head=2, n_embd=768,
        intermediate_size=2048, sliding_window=256, max_window_layers=0, eos_token_id=None,
    ),
}  # fmt: skip
PROMPT = 64


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
        tokens = prefill(model, idx, None, cache).argmax(-1)
        said = [tokens]
        for _ in range(n - 1):
            tokens = decode(model, tokens, None, cache).argmax(-1)
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


def seconds_of(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def bandwidth() -> float:
    """Bytes a second that a matrix-vector product over 1 GiB reads."""
    matrix, vector = torch.ones(2**14, 2**14), torch.ones(2**14)
    return matrix.nbytes / min(seconds_of(lambda: matrix @ vector) for _ in range(5))


def weight_bytes(model: CausalLM) -> int:
    """Bytes that one token reads: every matrix, but of a table that is only looked up, a row."""
    looked_up = [
        module.weight
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) and module.weight is not model.head_weight
    ]
    return sum(p.nbytes for p in model.parameters() if all(p is not t for t in looked_up))


def in_turns(
    runs: dict[str, Callable[[], object]], rounds: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of each run and the bandwidth, round by round."""
    seconds: dict[str, list[float]] = {kind: [] for kind in runs}
    bandwidths = []
    for _ in range(rounds):
        bandwidths.append(bandwidth())
        for kind, run in runs.items():
            seconds[kind].append(seconds_of(run))
    return seconds, bandwidths


def compare(config: Config, dtype: torch.dtype, batch: int, n: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of each, and what they are of transformers' and of the limit."""
    ours, theirs = twins(config, dtype)
    packed = copy.deepcopy(ours)
    use_packed_weights_(packed, rows=batch)
    generator = torch.Generator().manual_seed(1)
    idx = torch.randint(0, config.vocab_size, (batch, PROMPT), generator=generator)
    runs: dict[str, Callable[[], Any]] = {
        "transformers": their_run(theirs, idx, n),
        "ours": our_run(ours, idx, n),
        "ours, packed": our_run(packed, idx, n),
    }
    texts = {kind: run() for kind, run in runs.items()}  # which warms up, too
    same = {kind: torch.equal(text, texts["transformers"]) for kind, text in texts.items()}
    seconds, bandwidths = in_turns(runs, rounds)
    limits = [weight_bytes(ours) / each for each in bandwidths]  # seconds a step
    rows: dict[str, Any] = {}
    for kind, times in seconds.items():
        ratios = [b / a for a, b in zip(times, seconds["transformers"], strict=True)]
        shares = [limit * n / a for a, limit in zip(times, limits, strict=True)]
        rows[kind] = {
            "tokens_per_second": round(batch * n / statistics.median(times), 1),
            "over_transformers": round(statistics.median(ratios), 2),
            "from": round(min(ratios), 2),
            "to": round(max(ratios), 2),
            "share_of_limit": round(statistics.median(shares), 2),
            "greedy_tokens_equal": same[kind],
        }
    return rows


def context(config: Config, batch: int, lengths: list[int], rounds: int) -> dict[str, Any]:
    """Milliseconds of one token after so many others, for every way to remember them."""
    ours, theirs = twins(config, torch.float32)
    n_layer, longest = config.n_layer, max(lengths) + 2 * rounds + 2
    makers = {
        "growing": lambda: GrowingCache(n_layer),
        "preallocated": lambda: GrowingCache(n_layer, reserve=longest),
        "static": lambda: StaticCache(n_layer, longest),
    }
    if None not in config.windows:
        makers["sliding"] = lambda: cache_for(config.windows)
    table: dict[str, Any] = {kind: {} for kind in (*makers, "transformers", "no cache")}
    generator = torch.Generator().manual_seed(1)
    for length in lengths:
        idx = torch.randint(0, config.vocab_size, (batch, length), generator=generator)
        token = idx[:, -1]
        runs: dict[str, Callable[[], object]] = {}
        for kind, make in makers.items():
            cache = make()
            prefill(ours, idx, None, cache, chunk=256)
            runs[kind] = lambda cache=cache, token=token: decode(ours, token, None, cache)
        with torch.no_grad():
            past = theirs(idx, logits_to_keep=1).past_key_values

        @torch.no_grad()
        def theirs_step(past=past, token=token) -> None:
            theirs(token[:, None], past_key_values=past)

        runs["transformers"] = theirs_step
        runs["no cache"] = torch.no_grad()(lambda idx=idx: ours(idx, keep=slice(-1, None)))
        times: dict[str, list[float]] = {kind: [] for kind in runs}
        for number in range(rounds + 1):
            for kind, run in runs.items():
                if kind == "no cache" and number > 1:
                    continue  # one is enough: it takes seconds
                took = seconds_of(run)
                if number:
                    times[kind].append(1000 * took)
        for kind, took in times.items():
            table[kind][length] = round(statistics.median(took), 2)
    return table


def new_report(out: Path) -> dict[str, Any]:
    """What a report in that file begins with: the machine, torch, and GB/s that memory gives."""
    out.parent.mkdir(parents=True, exist_ok=True)
    return {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread(s)",
        "torch": torch.__version__,
        "bandwidth": round(bandwidth() / 1e9, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each model; default 5")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a run; default 128")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--out", default="build/bench/decoding.json")
    args = parser.parse_args()
    out = Path(args.out)
    report = new_report(out)
    print(f"bandwidth {report['bandwidth']} GB/s")
    for shape in args.shapes:
        for dtype in args.dtypes:
            for batch in (1, 8):
                rows = compare(
                    SHAPES[shape], getattr(torch, dtype), batch, args.tokens, args.rounds
                )
                report[f"{shape}, {dtype}, batch {batch}"] = rows
                print(f"\n{shape}, {dtype}, batch {batch}", flush=True)
                for kind, row in rows.items():
                    print(f"  {kind:20}", row, flush=True)
    for shape in CONTEXTS if "GPT-2 small" in args.shapes else ():
        for batch in (1, 8):
            lengths = [64, 256, 512, 1024, 2048]
            table = context(CONTEXTS[shape], batch, lengths, args.rounds)
            report[f"context, {shape}, batch {batch}"] = table
            print(f"\n{shape}, milliseconds of one token after n others, batch {batch}")
            for kind, row in table.items():
                growth = row[2048] / row[64]
                print(f"  {kind:14}", row, f"2048 over 64: {growth:.2f}", flush=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    main()
