"""The loss at the vocabulary of GPT-2, in time and memory: hidden states to gradients.

``transformers`` multiplies with the head and hands the logits to its loss function. Ours does the
same, or takes some tokens at a time, and never holds the logits of all
(:func:`~lm_from_scratch.training.loss.chunked_causal_lm_loss`), which is compared with both.
"""

from collections.abc import Callable, Iterator

import measure
import torch
import torch.nn.functional as F
from measure import Row, Size

from lm_from_scratch.instruments.onednn import multiplies
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training.loss import causal_lm_loss, chunked_causal_lm_loss
from lm_from_scratch.training.objective import autocast

#: rows, tokens in a row, width, vocabulary
SHAPES = {"full": (8, 256, 768, 50257), "quick": (2, 256, 768, 50257), "smoke": (2, 8, 16, 97)}
THEIRS = "transformers"
KINDS = (THEIRS, "ours", "ours, chunked")


def step_of(size: str, kind: str, dtype: str) -> Callable[[], None]:
    B, T, C, V = SHAPES[size]
    torch.manual_seed(0)
    x, weight = torch.randn(B, T, C, requires_grad=True), torch.randn(V, C).mul_(0.02)
    weight.requires_grad_()
    x.grad, weight.grad = torch.zeros_like(x), torch.zeros_like(weight)
    idx = torch.randint(0, V, (B, T))
    targets = next_token_targets(idx)
    if kind == THEIRS:
        from transformers.loss.loss_utils import ForCausalLMLoss

    def step() -> None:
        x.grad = weight.grad = None
        with autocast(torch.device("cpu"), dtype):
            if kind == THEIRS:
                loss = ForCausalLMLoss(F.linear(x, weight), idx, V)
            elif "chunked" in kind:
                loss = chunked_causal_lm_loss(x, weight, targets)
            else:
                loss = causal_lm_loss(F.linear(x, weight), targets)
        loss.backward()

    return step


def grown(size: str, kind: str, dtype: str) -> float:
    """MB that this process grows by in two steps; the gradients are there before."""
    return measure.growth(step_of(size, kind, dtype))


def rows(size: Size) -> Iterator[Row]:
    B, T, C, V = SHAPES[size.name]
    for dtype in ("float32", "bfloat16"):
        title = f"{B * T} tokens, vocabulary {V}, {dtype}"
        if not multiplies(getattr(torch, dtype)):
            for kind in KINDS[1:]:
                yield measure.absent(title, kind, THEIRS, "ms")
            yield measure.absent(title, KINDS[2], KINDS[1], "ms")
            continue
        runs = {kind: step_of(size.name, kind, dtype) for kind in KINDS}
        limit = f"matrix product {'fp32' if dtype == 'float32' else 'bf16'}"
        limits = {limit: measure.multiplying(getattr(torch, dtype), size)}
        times = measure.in_turns(runs, size.rows(3), limits, title=title)
        for kind in KINDS[1:]:
            work = 3 * 2 * B * T * C * V  # forward, and two products backward
            yield times.row(title, kind, THEIRS, limit=limit, work=work, target=1.0)
        yield times.row(title, KINDS[2], KINDS[1], target=1.0)
        if not measure.has_peak():
            continue
        held = {
            kind: [measure.in_a_process("bench_loss", "grown", size.name, kind, dtype)]
            for kind in KINDS
        }
        for kind in KINDS[1:]:
            target = 5.0 if "chunked" in kind else None
            peer = held[THEIRS]
            yield measure.compare(title, kind, THEIRS, "MB", held[kind], peer, target=target)
