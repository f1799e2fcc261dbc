"""The gated delta rule: chunks beside the recurrence, and beside the two forms of transformers."""

from collections.abc import Callable, Iterator
from typing import Any

import measure
import torch
from measure import Row, Size
from torch import Tensor

from lm_from_scratch.layers.delta_rule import chunk_delta_rule, recurrent_delta_rule, unit_length

#: rows, heads, tokens, features of a key and of a value
SHAPES = {
    "256 tokens, 4 heads of 64": (1, 4, 256, 64, 64),
    "1,024 tokens, 8 heads of 128": (1, 8, 1024, 128, 128),
    "smoke": (1, 1, 70, 4, 4),
}
RECURRENT = "ours, recurrent"


def inputs(shape: str, grad: bool) -> list[Tensor]:
    """q, k, v, g, beta and an empty state."""
    B, H, T, Dk, Dv = SHAPES[shape]
    torch.manual_seed(0)
    q, k = (unit_length(torch.randn(B, H, T, Dk)) for _ in range(2))
    leaves = [q, k, torch.randn(B, H, T, Dv), -torch.rand(B, H, T), torch.rand(B, H, T)]
    return [x.requires_grad_(grad) for x in leaves] + [torch.zeros(B, H, Dk, Dv)]


def runs(shape: str, grad: bool) -> dict[str, Callable[[], object]]:
    """The forms, each forward and, with ``grad``, backward."""
    from transformers.models.qwen3_next import modeling_qwen3_next as hf

    *tokens, state = inputs(shape, grad)
    laid_out = [x.detach().transpose(1, 2) for x in tokens]  # (B, T, H, ...)
    theirs = [x.clone(memory_format=torch.contiguous_format) for x in laid_out]
    theirs = [x.requires_grad_(grad) for x in theirs]
    scale = tokens[1].shape[-1] ** 0.5  # they divide the queries
    with torch.no_grad():
        theirs[0] *= scale
        want = recurrent_delta_rule(*tokens, state)[0]
        have = hf.torch_chunk_gated_delta_rule(*theirs)[0].transpose(1, 2)
        torch.testing.assert_close(have, want, atol=1e-4, rtol=1e-4)
    forms: dict[str, Callable[[], Any]] = {
        "ours, chunks": lambda: chunk_delta_rule(*tokens, state)[0],
        RECURRENT: lambda: recurrent_delta_rule(*tokens, state)[0],
        "transformers, chunks": lambda: hf.torch_chunk_gated_delta_rule(*theirs)[0],
        "transformers, recurrent": lambda: hf.torch_recurrent_gated_delta_rule(*theirs)[0],
    }

    def run(form: Callable[[], Tensor]) -> Callable[[], object]:
        def step() -> None:
            with torch.set_grad_enabled(grad):
                y = form()
            if grad:
                y.sum().backward()

        return step

    return {name: run(form) for name, form in forms.items()}


def rows(size: Size) -> Iterator[Row]:
    shapes = list(SHAPES)[2:] if size.smoke else list(SHAPES)[: 1 if size.quick else 2]
    for shape in shapes:
        for grad in (False, True):
            title = f"{shape}, forward and backward" if grad else f"{shape}, forward"
            times = measure.in_turns(runs(shape, grad), size.rows(3), title=title)
            yield times.row(title, "ours, chunks", RECURRENT)
            yield times.row(title, "ours, chunks", "transformers, chunks")
            yield times.row(title, RECURRENT, "transformers, recurrent")
