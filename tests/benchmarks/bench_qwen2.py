"""Forward and backward of Qwen2 beside transformers', in time and memory.

Both have the same weights and get the same batch; the loss is part of the step. Memory is the
growth of a process of its own during its first steps, weights and gradients not counted, because a
process never gives its peak back.
"""

from collections.abc import Callable, Iterator
from typing import Any

import measure
import torch
from measure import Row, Size
from torch import nn

from lm_from_scratch.checkpoint.configs import config_to_dict
from lm_from_scratch.instruments.onednn import multiplies, use_onednn_
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training.loss import causal_lm_loss, chunked_causal_lm_loss
from lm_from_scratch.training.objective import autocast

SMALL = "Qwen2, 10 M parameters"
LAYER = "one layer of Qwen2-0.5B and its head"
#: rows, tokens in a row, and the model
SHAPES: dict[str, tuple[int, int, dict[str, int]]] = {
    SMALL: (8, 256, dict(
        vocab_size=8192, n_layer=10, n_head=8, n_kv_head=2, n_embd=256, intermediate_size=768,
    )),
    LAYER: (1, 256, dict(n_layer=1)),
    "smoke": (2, 8, dict(
        vocab_size=97, n_layer=1, n_head=2, n_kv_head=1, n_embd=16, intermediate_size=24,
    )),
}  # fmt: skip
THEIRS = "transformers"
KINDS = (THEIRS, "ours", "ours, chunked loss", "ours, oneDNN")


def step_of(shape: str, kind: str, dtype: str) -> tuple[nn.Module, Callable[[], None]]:
    """A model, and its forward and backward pass."""
    B, T, sizes = SHAPES[shape]
    config = Qwen2Config(block_size=T, eos_token_id=None, **sizes)  # type: ignore[arg-type]
    torch.manual_seed(0)
    idx = torch.randint(0, config.vocab_size, (B, T))
    targets = next_token_targets(idx)
    if kind == THEIRS:
        from transformers import Qwen2Config as HFConfig
        from transformers import Qwen2ForCausalLM as HFModel

        model: Any = HFModel(HFConfig(**config_to_dict(config), use_cache=False)).train()
    else:
        model = Qwen2ForCausalLM(config)
        if kind == "ours, oneDNN":
            use_onednn_(model)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with autocast(torch.device("cpu"), dtype):
            if kind == THEIRS:
                loss = model(idx, labels=idx).loss
            elif "chunked" in kind:
                loss = chunked_causal_lm_loss(model.model(idx), model.head.weight, targets)
            else:
                loss = causal_lm_loss(model(idx), targets)
        loss.backward()

    return model, step


def grown(shape: str, kind: str, dtype: str) -> float:
    """MB that this process grows by in two steps, weights and gradients not counted."""
    model, step = step_of(shape, kind, dtype)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return measure.growth(step)


def rows(size: Size) -> Iterator[Row]:
    for shape in ("smoke",) if size.smoke else (SMALL,) if size.quick else (SMALL, LAYER):
        for dtype in ("float32", "bfloat16"):
            title = f"{shape}, {dtype}"
            kinds = KINDS if dtype == "float32" else KINDS[:-1]
            if not multiplies(getattr(torch, dtype)):
                for kind in kinds[1:]:
                    yield measure.absent(title, kind, THEIRS, "ms")
                continue
            runs = {kind: step_of(shape, kind, dtype)[1] for kind in kinds}
            times = measure.in_turns(runs, size.rows(3), title=title)
            for kind in kinds[1:]:
                yield times.row(title, kind, THEIRS)
            if not measure.has_peak():
                continue
            held = {
                kind: [measure.in_a_process("bench_qwen2", "grown", shape, kind, dtype)]
                for kind in KINDS[:3]
            }
            for kind in KINDS[1:3]:
                yield measure.compare(title, kind, THEIRS, "MB", held[kind], held[THEIRS])
