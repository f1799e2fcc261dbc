"""Training beside transformers' GPT-2 and nanoGPT, in throughput and in memory.

All models have the same size and get the same batches, the same fused AdamW and the same clipping.
``ours`` multiplies with the library that is measured to be faster here, as ``train`` does.
What a switch brings is ours only as far as transformers, with the same switch, does not gain it
too: bfloat16 and ``torch.compile`` are compared at equal switches, and once with what is shipped.

Memory is the growth of a process of its own during two steps; weights, gradients and the state of
the optimizer are there before.
"""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import measure
import peers
import torch
from measure import Row, Size
from peers import NANOGPT, TRANSFORMERS
from torch import Tensor

from lm_from_scratch.instruments.layout import simplest_fast, time_products
from lm_from_scratch.instruments.onednn import multiplies, use_onednn_
from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.optim.choose import parameter_groups
from lm_from_scratch.text.batch import Batch
from lm_from_scratch.training.objective import NextTokenLoss, autocast
from lm_from_scratch.training.train import optimizer_step

#: vocabulary, tokens, rows, layers, heads, width
SHAPES = {
    "GPT-2, 10 M parameters": (8192, 256, 8, 10, 8, 256),
    "GPT-2, the shipped model": (4096, 256, 16, 8, 4, 128),
    "smoke": (97, 16, 2, 2, 2, 16),
}
NEWCOMER = "in training as it is shipped, in float32"
EQUAL = "in training in bfloat16, both with the same switches"
Step = Callable[[], object]


def step_of(
    shape: str,
    kind: str,
    dtype: str,
    onednn: bool = False,
    compiled: Callable[..., Any] | None = None,
) -> tuple[torch.nn.Module, Step]:
    """A model, and a step of its training: forward, backward, clipping and AdamW."""
    V, T, B, L, H, C = SHAPES[shape]
    torch.manual_seed(0)
    idx = torch.randint(0, V, (B, T + 1))
    batch = Batch(idx[:, :-1].contiguous(), idx[:, 1:].contiguous())
    sizes: dict[str, Any] = dict(
        vocab_size=V, n_layer=L, n_head=H, n_embd=C, embd_pdrop=0.0, resid_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    if kind == "ours":
        ours = GPT2LMHeadModel(GPT2Config(block_size=T, **sizes))
        if onednn:
            use_onednn_(ours)
        adam = torch.optim.AdamW(parameter_groups(ours, 0.1), fused=True)
        objective = NextTokenLoss(ours, dtype)
        if compiled is not None:
            objective.forward = compiled(objective.forward)  # type: ignore[method-assign]
        return ours, lambda: optimizer_step(objective, adam, [batch])

    model = peers.gpt2_of(kind, T, sizes)
    adam = torch.optim.AdamW(parameter_groups(model, 0.1), fused=True)

    def their_loss() -> Tensor:
        with autocast(torch.device("cpu"), dtype):
            if kind == NANOGPT:
                return model(batch.idx, batch.targets)[1]
            return model(batch.idx, labels=batch.idx).loss

    loss = their_loss if compiled is None else compiled(their_loss)

    def step() -> None:
        adam.zero_grad(set_to_none=True)
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()

    return model, step


def grown(shape: str, kind: str, dtype: str, onednn: bool) -> float:
    """MB that this process grows by in two steps, without what is there between them."""
    model, step = step_of(shape, kind, dtype, onednn)
    held = [torch.ones_like(p) for p in model.parameters() for _ in range(3)]
    del held  # as large as gradients and two moments
    return measure.growth(step)


def rows(size: Size) -> Iterator[Row]:
    for shape in ("smoke",) if size.smoke else list(SHAPES)[: 1 if size.quick else 2]:
        yield from compare(shape, size)


def compare(title: str, size: Size) -> Iterator[Row]:
    _, T, B, L, _, C = SHAPES[title]
    plain: Any = step_of(title, "ours", "float32")[0]
    took = time_products(plain, B * T)
    library = simplest_fast({way[1]: s for way, s in took.items() if way[0] == "float32"})
    others = [TRANSFORMERS]
    if importlib.util.find_spec("nano_gpt"):
        others.append(NANOGPT)
    runs = {other: step_of(title, other, "float32")[1] for other in others}
    for name in ("torch", "onednn"):
        runs[f"ours, {name}"] = step_of(title, "ours", "float32", name == "onednn")[1]
    limits = {"matrix product fp32": measure.multiplying(torch.float32, size)}
    compile, bf16 = "shipped" not in title, multiplies(torch.bfloat16)
    if bf16:
        limits["matrix product bf16"] = measure.multiplying(torch.bfloat16, size)
    for kind in ("ours", *others) if bf16 else ():
        runs[f"{kind} bf16"] = step_of(title, kind, "bfloat16")[1]
    for kind in ("ours", TRANSFORMERS) if bf16 and compile else ():
        by = lambda function: measure.compiled(function, size)  # noqa: E731
        runs[f"{kind} bf16, compiled"] = step_of(title, kind, "bfloat16", compiled=by)[1]
    times = measure.in_turns(runs, size.rounds, limits, title=title)
    times.seconds["ours"] = times.seconds[f"ours, {library}"]
    # 6 operations for each weight and token, and attention's two products
    work = B * T * (6 * sum(p.numel() for p in plain.parameters()) + 12 * L * C * T / 2)
    pairs: list[tuple[str, str, float | None]] = [
        ("ours", TRANSFORMERS, 1.35 if compile else None),
        ("ours", NANOGPT, 1.0),
        ("ours, torch", TRANSFORMERS, None),
        ("ours, torch", NANOGPT, 1.0),
        ("ours, onednn", TRANSFORMERS, None),
        ("ours bf16", f"{TRANSFORMERS} bf16", 1.0),
        ("ours bf16", f"{NANOGPT} bf16", 1.0),
    ]
    if compile:
        both = "bf16, compiled"
        pairs += [(f"ours {both}", f"{TRANSFORMERS} {both}", 1.0)]
        pairs += [(f"ours {both}", TRANSFORMERS, 2.8)]
    for kind, peer, target in pairs:
        if kind not in times.seconds:
            yield measure.absent(title, kind, peer, "tokens/s")
        elif peer not in times.seconds:
            yield measure.absent(title, kind, peer, "tokens/s", "not installed")
        else:
            same = EQUAL if kind.replace("ours", TRANSFORMERS) == peer else ""
            newcomer = NEWCOMER if (kind, peer) == ("ours", TRANSFORMERS) else same
            limit = "matrix product bf16" if "bf16" in kind else "matrix product fp32"
            note = f"by {library}, measured to be the faster" if kind == "ours" else ""
            yield times.row(
                title, kind, peer, tokens=B * T, limit=limit, work=work, target=target,
                headline=newcomer, note=note,
            )  # fmt: skip
    if measure.has_peak():
        held = {
            kind: [measure.in_a_process("bench_training", "grown", title, kind, "float32", onednn)]
            for kind, onednn in [
                ("ours", library == "onednn"),
                *((other, False) for other in others),
            ]
        }
        for other in others:
            yield measure.compare(title, "ours", other, "MB", held["ours"], held[other])
