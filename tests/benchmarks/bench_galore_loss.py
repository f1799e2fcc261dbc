"""What GaLore learns beside AdamW, at equal tokens.

``python tests/benchmarks/bench_galore_loss.py``

A Qwen2 of 0.7 M parameters reads Python's language reference and docstrings. There are two learning
rates, because GaLore changes the step of the block's matrices alone: one for them, one for the
embedding, the norms and the biases, which AdamW trains in every kind. Both are found by one rule
for AdamW and for GaLore: the best held-out loss of seed 0 on a grid of powers of two, first that of
the others, then that of the matrices; a grid is extended while its best is at an edge. Then every
kind runs with three other seeds; the variants of GaLore take GaLore's rates. ``scale`` is 1: it
multiplies the learning rate, and nothing else that matters here. About an hour on one quiet core.
Finished runs are kept in the file, so that a stopped benchmark goes on.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import measure
import torch
from torch import nn
from tqdm import tqdm

from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.runs.config import TrainConfig
from lm_from_scratch.text.batches import PackedBatches, sequential_batches, write_tokens
from lm_from_scratch.text.corpora import load_split
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.loss import causal_lm_loss
from lm_from_scratch.training.train import evaluate, learning_rate

GAP = 50
KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "GaLore, rank 32": dict(rank=32, scale=1.0, update_proj_gap=GAP),
    "rotated moments": dict(rank=32, scale=1.0, update_proj_gap=GAP, moments="rotate"),
    "reset moments": dict(rank=32, scale=1.0, update_proj_gap=GAP, moments="reset"),
    "subspace iteration": dict(rank=32, scale=1.0, update_proj_gap=GAP, basis="subspace"),
    "random basis": dict(rank=32, scale=1.0, update_proj_gap=GAP, projection_type="random"),
    "frozen basis": dict(rank=32, scale=1.0, update_proj_gap=None),
    "rank 8": dict(rank=8, scale=1.0, update_proj_gap=GAP),
}
TUNED = ("AdamW", "GaLore, rank 32")
SEEDS = (1, 2, 3)


def run(
    kind: str, lr: float, others_lr: float, seed: int, steps: int, data: tuple[Any, ...]
) -> float:
    """Train one model; its held-out loss in nats per token."""
    train_file, held_out, vocab_size = data
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab_size, block_size=128, n_layer=3, n_head=4, n_kv_head=2, n_embd=128,
            intermediate_size=344, rope_theta=10000.0, eos_token_id=None,
        )
    ).train()  # fmt: skip
    blocks = {id(p) for p in model.model.layers.parameters() if p.dim() == 2}
    matrices = [p for p in model.parameters() if id(p) in blocks]
    others = [p for p in model.parameters() if id(p) not in blocks]
    groups = [
        {"params": matrices, "lr": lr, "weight_decay": 0.1, **KINDS[kind]},
        {"params": others, "lr": others_lr, "weight_decay": 0.0},
    ]
    optimizer = (GaLore if KINDS[kind] else AdamW)(groups, betas=(0.9, 0.95), fused=True)
    config = TrainConfig(steps=steps, lr=1.0, min_lr=0.1, warmup=steps // 10)
    batches = PackedBatches(train_file, 8, 128, seed)
    for step in tqdm(range(1, steps + 1), desc=f"{kind}, seed {seed}", leave=False):
        for group, peak in zip(optimizer.param_groups, (lr, others_lr), strict=True):
            group["lr"] = peak * learning_rate(step, config)
        batch = batches[step - 1]
        optimizer.zero_grad()
        causal_lm_loss(
            model(batch.idx, positions=batch.positions, documents=batch.documents), batch.targets
        ).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return evaluate(model, held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of 1,024 tokens; default 300")
    parser.add_argument("--out", default=measure.ROOT / "docs" / "galore_loss.json", type=Path)
    args = parser.parse_args()
    out = args.out
    found: dict[str, float] = json.loads(out.read_text()) if out.is_file() else {}

    with tempfile.TemporaryDirectory() as folder:
        train_documents, held_out_documents = load_split(["reference", "docstrings"], 0.05)
        tokenizer = Tokenizer.train([d.text for d in train_documents], 1024)
        train_file = write_tokens(train_documents, tokenizer, Path(folder) / "train.bin")
        held_out_file = write_tokens(held_out_documents, tokenizer, Path(folder) / "held_out.bin")
        held_out = list(sequential_batches(held_out_file, 16, 128))[:16]
        data = (train_file, held_out, tokenizer.vocab_size)

        def loss(kind: str, rates: tuple[float, float], seed: int) -> float:
            lr, others_lr = rates
            key = f"{kind} | lr {lr:.4g}, others {others_lr:.4g} | seed {seed} | {args.steps} steps"
            if key not in found:
                found[key] = round(run(kind, lr, others_lr, seed, args.steps, data), 5)
                measure.write(found, out)
                print(f"{key}: {found[key]:.4f}", flush=True)
            return found[key]

        def tuned(kind: str, rates: list[float], which: int) -> None:
            """Set ``rates[which]`` to the best power of two, in thousandths."""
            powers = [1, 2, 3]
            while True:
                losses = {}
                for power in powers:
                    rates[which] = 1e-3 * 2**power
                    losses[power] = loss(kind, (rates[0], rates[1]), 0)
                power = min(losses, key=losses.__getitem__)
                rates[which] = 1e-3 * 2**power
                if powers[0] < power < powers[-1]:
                    return
                powers = [powers[0] - 1, *powers] if power == powers[0] else [*powers, power + 1]

        best: dict[str, tuple[float, float]] = {}
        for kind in TUNED:
            rates = [2e-3, 2e-3]
            tuned(kind, rates, 1)
            tuned(kind, rates, 0)
            best[kind] = (rates[0], rates[1])
            print(f"{kind}: learning rates {rates[0]:.4g}, others {rates[1]:.4g}")
        print(f"\nheld-out loss after {args.steps} steps, seeds {SEEDS}")
        for kind in KINDS:
            rates = best["AdamW" if kind == "AdamW" else "GaLore, rank 32"]
            losses = [loss(kind, rates, seed) for seed in SEEDS]
            low, high = min(losses), max(losses)
            print(f"  {kind:20} {statistics.mean(losses):.4f} ({low:.4f} to {high:.4f})")


if __name__ == "__main__":
    main()
