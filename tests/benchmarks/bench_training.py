"""Training throughput beside transformers' GPT-2.

All models have the same size and get the same batches, the same fused AdamW and the same clipping.
``ours`` multiplies with the library that is measured to be faster here, as ``train`` does.
What a switch brings is ours only as far as transformers, with the same switch, does not gain it
too: bfloat16 and ``torch.compile`` are compared at equal switches, and once with what is shipped.
"""

import copy
from collections.abc import Callable, Iterator

import measure
import torch
from measure import Row, Size
from transformers import GPT2Config as HFConfig
from transformers import GPT2LMHeadModel as HFModel

from lm_from_scratch.instruments.layout import simplest_fast, time_products
from lm_from_scratch.instruments.onednn import multiplies, use_onednn_
from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.optim.choose import parameter_groups
from lm_from_scratch.text.batch import Batch
from lm_from_scratch.training.objective import NextTokenLoss, autocast
from lm_from_scratch.training.train import optimizer_step

#: vocabulary, tokens, rows, layers, heads, width
SHAPES = {
    "GPT-2, 10 M parameters": (8192, 256, 8, 10, 8, 256),
    "GPT-2, the shipped model": (4096, 256, 16, 8, 4, 128),
}
THEIRS, COMPILED = "transformers", "transformers bf16, compiled"
NEWCOMER = "in training as it is shipped, in float32"
EQUAL = "in training in bfloat16, both with the same switches"


def faster_library(model: CausalLM, rows: int) -> str:
    """``torch`` or ``onednn``: by which the float32 products of a step are faster here."""
    took = {way[1]: s for way, s in time_products(model, rows).items() if way[0] == "float32"}
    return simplest_fast(took)


def rows(size: Size) -> Iterator[Row]:
    for title, shape in list(SHAPES.items())[: 1 if size.quick else None]:
        yield from compare(title, (97, 16, 2, 2, 2, 16) if size.smoke else shape, size)


def compare(title: str, shape: tuple[int, ...], size: Size) -> Iterator[Row]:
    V, T, B, L, H, C = shape
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=V, n_layer=L, n_head=H, n_embd=C, embd_pdrop=0.0, resid_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    idx = torch.randint(0, V, (B, T + 1))
    batch = Batch(idx[:, :-1].contiguous(), idx[:, 1:].contiguous())
    plain = GPT2LMHeadModel(GPT2Config(block_size=T, **sizes))
    n = sum(p.numel() for p in plain.parameters())
    library = faster_library(plain, B * T)

    def our_step(dtype: str, onednn: bool = False, compile: bool = False) -> Callable[[], object]:
        model = copy.deepcopy(plain)
        if onednn:
            use_onednn_(model)
        adam = torch.optim.AdamW(parameter_groups(model, 0.1), fused=True)
        loss_of = NextTokenLoss(model, dtype)
        if compile:
            loss_of.forward = measure.compiled(loss_of.forward, size)  # type: ignore[method-assign]
        return lambda: optimizer_step(loss_of, adam, [batch])

    def their_step(dtype: str, compile: bool = False) -> Callable[[], object]:
        model = HFModel(HFConfig(n_positions=T, use_cache=False, **sizes)).train()
        adam = torch.optim.AdamW(parameter_groups(model, 0.1), fused=True)

        def loss_of() -> torch.Tensor:
            with autocast(torch.device("cpu"), dtype):
                return model(batch.idx, labels=batch.idx).loss

        loss = measure.compiled(loss_of, size) if compile else loss_of

        def step() -> None:
            adam.zero_grad(set_to_none=True)
            loss().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()

        return step

    runs = {
        THEIRS: their_step("float32"),
        "ours, torch": our_step("float32"),
        "ours, onednn": our_step("float32", onednn=True),
    }
    limits = {"matrix product fp32": measure.multiplying(torch.float32, size)}
    compile, bf16 = "10 M" in title, multiplies(torch.bfloat16)
    if bf16:
        runs |= {"transformers bf16": their_step("bfloat16"), "ours bf16": our_step("bfloat16")}
        limits["matrix product bf16"] = measure.multiplying(torch.bfloat16, size)
    if bf16 and compile:
        runs[COMPILED] = their_step("bfloat16", compile=True)
        runs["ours bf16, compiled"] = our_step("bfloat16", compile=True)
    times = measure.in_turns(runs, size.rounds, limits, title=title)
    times.seconds["ours"] = times.seconds[f"ours, {library}"]
    # 6 operations for each weight and token, and attention's two products
    work = B * T * (6 * n + 12 * L * C * T / 2)
    fp32 = 1.35 if compile else None
    pairs: list[tuple[str, str, float | None]] = [
        ("ours", THEIRS, fp32),
        ("ours, torch", THEIRS, None),
        ("ours, onednn", THEIRS, None),
        ("ours bf16", "transformers bf16", 1.0),
    ]
    if compile:
        pairs += [("ours bf16, compiled", COMPILED, 1.0), ("ours bf16, compiled", THEIRS, 2.8)]
    for kind, peer, target in pairs:
        if kind not in times.seconds:
            yield measure.absent(title, kind, peer, "tokens/s")
            continue
        limit = "matrix product bf16" if "bf16" in kind else "matrix product fp32"
        same = EQUAL if kind.replace("ours", THEIRS) == peer else ""
        yield times.row(
            title, kind, peer, tokens=B * T, limit=limit, work=work, target=target,
            headline=NEWCOMER if kind == "ours" else same,
            note=f"by {library}, measured to be the faster" if kind == "ours" else "",
        )  # fmt: skip
