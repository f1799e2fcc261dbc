"""Training throughput beside transformers' GPT-2, in one run: ``make bench``.

All models have the same size and get the same batches, the same fused AdamW and the same clipping.
Their steps alternate, so that a slow moment of the machine meets all. The limit is what the
machine's own matrix product reaches in the same run; in float32, oneDNN may pass it.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from transformers import GPT2Config as HFConfig
from transformers import GPT2LMHeadModel as HFModel

from lm_from_scratch.data import Batch
from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.onednn import use_onednn_
from lm_from_scratch.train import TrainConfig, autocast, optimizer_step, parameter_groups

#: vocabulary, tokens, rows, layers, heads, width
SHAPES = {
    "10 M parameters": (8192, 256, 8, 10, 8, 256),
    "the shipped model": (4096, 256, 16, 8, 4, 128),
}


def matmul_flops(dtype: torch.dtype) -> float:
    """Operations per second of one large matrix product."""
    a, b = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
    a @ b
    start = time.perf_counter()
    for _ in range(3):
        a @ b
    return 3 * 2 * 2048**3 / (time.perf_counter() - start)


def hf_step(model: HFModel, optimizer: torch.optim.Optimizer, batch: Batch, dtype: str) -> None:
    optimizer.zero_grad(set_to_none=True)
    with autocast(torch.device("cpu"), dtype):
        loss = model(batch.idx, labels=batch.idx).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="steps of each model; default 7")
    parser.add_argument("--out", default="build/bench/training.json")
    args = parser.parse_args()
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    machine = f"{platform.machine()}, {torch.get_num_threads()} thread(s)"
    report = {"machine": machine, "torch": torch.__version__}
    for name, shape in SHAPES.items():
        report[name] = compare(name, shape, args.rounds)
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten to {out}")


def compare(title: str, shape: tuple[int, ...], rounds: int) -> dict[str, object]:
    """Both models at one shape, step by step in turn."""
    V, T, B, L, H, C = shape
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=V, block_size=T, n_layer=L, n_head=H, n_embd=C, embd_pdrop=0.0,
        resid_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    ours, with_onednn = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
    use_onednn_(with_onednn)
    theirs = HFModel(
        HFConfig(
            vocab_size=V, n_positions=T, n_layer=L, n_head=H, n_embd=C, embd_pdrop=0.0,
            resid_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, use_cache=False,
        )
    ).train()  # fmt: skip
    n = sum(p.numel() for p in ours.parameters())
    assert n == sum(p.numel() for p in theirs.parameters())
    models = {"transformers": theirs, "ours": ours, "ours, oneDNN": with_onednn}
    adam = {
        name: torch.optim.AdamW(parameter_groups(model, 0.1), fused=True)
        for name, model in models.items()
    }
    idx = torch.randint(0, V, (B, T + 1))
    batch = Batch(idx[:, :-1].contiguous(), idx[:, 1:].contiguous())
    # 6 operations for each weight and token, and attention's two products
    operations = B * T * (6 * n + 12 * L * C * T / 2)
    report: dict[str, object] = {"parameters": n, "batch": [B, T], "layers": L, "width": C}
    print(f"\n{title}: {n} parameters, {L} layers, width {C}, batch {B} x {T}")
    for dtype, torch_dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        train_config = TrainConfig(steps=1, dtype=dtype)
        seconds: dict[str, list[float]] = {
            name: [] for name in models if dtype == "float32" or "oneDNN" not in name
        }
        limits = []
        for round_number in range(rounds + 1):
            for name in seconds:
                start = time.perf_counter()
                if name == "transformers":
                    hf_step(theirs, adam[name], batch, dtype)
                else:
                    optimizer_step(models[name], adam[name], [batch], train_config)
                if round_number:  # the first round warms up
                    seconds[name].append(time.perf_counter() - start)
            limits.append(matmul_flops(torch_dtype))
        rows = {
            name: {
                "tokens_per_second": round(B * T / statistics.median(times)),
                "slowest": round(B * T / max(times)),
                "fastest": round(B * T / min(times)),
                "share_of_matmul": round(
                    operations / statistics.median(times) / statistics.median(limits), 3
                ),
            }
            for name, times in seconds.items()
        }
        peer = seconds["transformers"]
        for name, times in seconds.items():
            ratios = [b / a for a, b in zip(times, peer, strict=True)]
            rows[name]["over_transformers"] = round(statistics.median(ratios), 2)
            rows[name]["from"] = round(min(ratios), 2)
            rows[name]["to"] = round(max(ratios), 2)
        report[dtype] = rows
        print(f"  {dtype}")
        for name, row in rows.items():
            print(f"    {name:13}" + ", ".join(f"{key} {value}" for key, value in row.items()))
    return report


if __name__ == "__main__":
    main()
