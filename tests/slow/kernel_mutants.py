"""Mistakes in kernels, put in place and run in Triton's interpreter: which gate finds them.

    TRITON_INTERPRET=1 PYTHONPATH=tests/helpers python tests/slow/kernel_mutants.py

Gates, in order of cost: the *values*, plainly; other *layouts* of inputs and gradients; memory
*poisoned* with NaN. Some mistakes are in what a launch is given; they wrap the kernel. What only
the compiler sees is in the record of the compiled kernels. What only a GPU sees has a reason below.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import kernel_checks
import pytest
import torch
import triton
import triton.language as tl
from kernel_checks import DEVICE, check, numbers, strided
from mutants import Laws, Mutant, judged, show
from torch import Tensor

from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.kernels import adamw, attention, decoding, int8, loss, matmul, norm, softmax
from lm_from_scratch.kernels import rope as rope_kernels
from lm_from_scratch.kernels import swiglu as swiglu_file
from lm_from_scratch.kernels.softmax import LOWEST
from lm_from_scratch.layers import gated_mlp, rope
from lm_from_scratch.layers.norm import rms_norm
from lm_from_scratch.optim.adamw import adamw as adamw_reference
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training.loss import causal_lm_loss
from lm_from_scratch.weights import quantized_weight
from lm_from_scratch.weights.int8 import Int8Weight

GATES = {"values": ["values"], "layouts": ["values", "layouts"], "poison": kernel_checks.GATES}
FLOAT = torch.float32


class Launched:
    """A kernel whose launches get other arguments, made from those by name."""

    def __init__(self, kernel: Any, **changes: Callable[[dict[str, Any]], Any]) -> None:
        self.kernel, self.changes = kernel, changes
        self.signature = inspect.signature(kernel.fn)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            options = {k: v for k, v in kwargs.items() if k not in self.signature.parameters}
            given = {k: v for k, v in kwargs.items() if k not in options}
            named = self.signature.bind(*args, **given).arguments
            named |= {name: change(named) for name, change in self.changes.items()}
            return self.kernel[grid](**named, **options)

        return launch


# ---------------------------------------------------------------------------------------- laws


def law_swiglu() -> None:
    check(swiglu_file.swiglu, gated_mlp.swiglu, *two(), dtype=FLOAT, layout=strided)


def two() -> list[Tensor]:
    return [numbers(5, 37, seed=seed) for seed in (0, 1)]


def law_softmax() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "BLOCK", 16)  # rows of several blocks
        rising = torch.arange(37, dtype=torch.float64) / 3 - 14
        x = torch.stack([rising, -rising, numbers(37, grad=False)]).requires_grad_()
        check(
            softmax.softmax, partial(torch.softmax, dim=-1), x, dtype=FLOAT, name="softmax",
            upstreams=not_of_the_sum,
        )  # fmt: skip


def not_of_the_sum(like: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """The sum of probabilities is 1: its gradient is 0, and nothing to compare."""
    given = kernel_checks.upstreams(like, generator)
    return {name: upstream for name, upstream in given.items() if name != "of sum()"}


def law_norm() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm, "PROGRAMS", 2)  # each walks over several blocks of rows
        check(norm.rms_norm, rms_norm, numbers(97, 37), numbers(37, seed=1), dtype=FLOAT)


def law_rope() -> None:
    positions = torch.arange(37)[None] + 1000 * torch.arange(2)[:, None]
    angles = rope.rotation(positions, rope.inverse_frequencies(20, 10000.0))
    cos, sin = (angle.to(DEVICE) for angle in angles)
    check(
        lambda x: rope_kernels.apply_rope(x, cos, sin), lambda x: rope.apply_rope(x, cos, sin),
        numbers(2, 3, 37, 20), dtype=FLOAT, name="rope", layout=tokens_first,
    )  # fmt: skip


def tokens_first(x: Tensor) -> Tensor:
    """(B, H, T, D) as a projection leaves it: (B, T, H, D) in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if "layouts" in kernel_checks.GATES else x


def law_adamw() -> None:
    options: dict[str, Any] = dict(lr=0.3, betas=(0.8, 0.99), eps=0.01, weight_decay=0.1)
    param, grad, m, v = (numbers(5, 37, seed=seed, grad=False) for seed in range(4))
    check(
        lambda *args: adamw.adamw(*args, 2, **options),
        lambda *args: adamw_reference(*args, 2, **options),
        param, grad, m, v.square(), dtype=FLOAT, name="adamw",
    )  # fmt: skip


def law_matmul() -> None:
    a, b = numbers(70, 37), numbers(37, 73, seed=1)
    check(matmul.matmul, torch.matmul, a, b, dtype=FLOAT, layout=strided)


def law_int8() -> None:
    weight = Int8Weight.quantize(numbers(71, 133, seed=1, scale=0.25, grad=False), None)

    def product(function: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        return function(x, Int8Weight.wrap(codes.shape, codes.shape[1], codes=codes, scale=scale))

    check(
        partial(product, int8.linear), partial(product, quantized_weight.linear), numbers(3, 133),
        weight.codes, weight.scale, dtype=FLOAT, name="int8",
    )  # fmt: skip


def law_loss() -> None:
    targets = torch.tensor([[3, IGNORE, 300, 0, IGNORE]] * 3)
    logits = numbers(3, 5, 301)
    before = logits.detach().clone()
    check(loss.causal_lm_loss, causal_lm_loss, logits, targets, dtype=FLOAT)
    assert torch.equal(logits, before)


def law_attention() -> None:
    for S in (37, 70):  # as many keys as queries, and more, as after a cache
        seen = torch.arange(S, device=DEVICE)[None]
        visibility = Visibility(seen[:, S - 37 :], seen, dense=True)
        q, k, v = (numbers(2, H, T, 20, seed=H + T) for H, T in ((4, 37), (2, S), (2, S)))
        check(attention.flash_attention, sdpa_attention, q, k, v, visibility, dtype=FLOAT)


def law_decoding() -> None:
    seen = torch.arange(200, device=DEVICE)[None]
    visibility = Visibility(seen[:, -1:], seen, dense=True)
    q, k, v = (
        numbers(2, H, T, 16, seed=H + T, grad=False) for H, T in ((4, 1), (2, 200), (2, 200))
    )
    check(decoding.decode_attention, sdpa_attention, q, k, v, visibility, dtype=FLOAT)


def gates(law: Callable[[], None]) -> Laws:
    """The law with more and more of what the checks do."""

    def at(names: list[str]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel_checks, "GATES", names)
            law()

    return {gate: partial(at, names) for gate, names in GATES.items()}


# ------------------------------------------------------------------------------------ mistakes


@triton.jit
def swiglu_stores_all(gate, up, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    g = tl.load(gate + offsets, mask=inside).to(tl.float32)
    u = tl.load(up + offsets, mask=inside).to(tl.float32)
    tl.store(out + offsets, g * tl.sigmoid(g) * u)


@triton.jit
def swiglu_without_masks(gate, up, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + offsets).to(tl.float32)
    u = tl.load(up + offsets).to(tl.float32)
    tl.store(out + offsets, g * tl.sigmoid(g) * u)


def swiglu_gradient_as_it_lies(
    grad: Tensor, gate: Tensor, up: Tensor, backward: Any = swiglu_file.swiglu_backward_kernel
) -> tuple[Tensor, Tensor]:
    gate, up = gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    n, BLOCK = gate.numel(), swiglu_file.BLOCK
    backward[(triton.cdiv(n, BLOCK),)](grad, gate, up, grad_gate, grad_up, n, BLOCK=BLOCK)
    return grad_gate, grad_up


@triton.jit
def softmax_padded_with_0(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    top = LOWEST
    total = 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row + column, mask=column < width, other=0.0).to(tl.float32)
        raised = tl.maximum(top, tl.max(value, axis=0))
        total = total * tl.exp(top - raised) + tl.sum(tl.exp(value - raised), axis=0)
        top = raised
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row + column, mask=column < width, other=0.0).to(tl.float32)
        tl.store(out + row + column, tl.exp(value - top) / total, mask=column < width)


@triton.jit
def softmax_not_rescaled(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    top = LOWEST
    total = 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row + column, mask=column < width, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(value, axis=0))
        total = total + tl.sum(tl.exp(value - top), axis=0)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row + column, mask=column < width, other=-float("inf")).to(tl.float32)
        tl.store(out + row + column, tl.exp(value - top) / total, mask=column < width)


@triton.jit(do_not_specialize=["rows"])
def norm_over_the_block(
    x, weight, out, inverse, rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    offsets = row[:, None] * width + column[None, :]
    value = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(value * value, axis=1) / BLOCK + eps)
    tl.store(out + offsets, value * r[:, None] * w[None, :], mask=inside)
    tl.store(inverse + row, r, mask=row < rows)


@triton.jit
def adamw_eps_inside(
    param, grad, exp_avg, exp_avg_sq, n,
    beta1, rest1, beta2, rest2, eps, decay, lr, correction1, correction2, of_the_step,
    BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    p = tl.load(param + offsets, mask=inside).to(tl.float32)
    g = tl.load(grad + offsets, mask=inside).to(tl.float32)
    m = beta1 * tl.load(exp_avg + offsets, mask=inside).to(tl.float32) + rest1 * g
    v = beta2 * tl.load(exp_avg_sq + offsets, mask=inside).to(tl.float32) + rest2 * g * g
    direction = m / correction1 / tl.sqrt(v / correction2 + eps)
    tl.store(param + offsets, decay * p - lr * direction, mask=inside)
    tl.store(exp_avg + offsets, m, mask=inside)
    tl.store(exp_avg_sq + offsets, v, mask=inside)


@triton.jit
def tile_of_another_group(program, tiles_m, tiles_n, GROUP: tl.constexpr):
    first = program // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = program % (GROUP * tiles_n)
    return first + within // height, within % height


@triton.jit
def matmul_in_tf32(
    a, b, out_in, out, M, N, K, beta, alpha,
    a_m, a_k, b_k, b_n, in_m, in_n, out_m, out_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    m, n = matmul.tile_of(program, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    rows = (m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    columns = (n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K).to(tl.int64)
        inside = (rows < M) & (ks < K)[None, :]
        left = tl.load(a + rows * a_m + ks[None, :] * a_k, mask=inside, other=0.0)
        inside = (ks < K)[:, None] & (columns < N)
        right = tl.load(b + ks[:, None] * b_k + columns * b_n, mask=inside, other=0.0)
        total = tl.dot(left.to(right.dtype), right, total, input_precision="tf32")
    inside = (rows < M) & (columns < N)
    tl.store(out + rows * out_m + columns * out_n, total, mask=inside)


@triton.jit
def load_rows_beyond(
    x, strides, b, h, start, n, D: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr
):
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDE)
    x += b * strides[0] + h.to(tl.int64) * strides[1] + start.to(tl.int64) * strides[2]
    inside = (row < n)[:, None] & (column < D)
    return tl.load(x + (row[:, None] * strides[2] + column), mask=inside, other=0.0)


@triton.jit
def sees_from_the_first_key(rule, b, t, s, T, S, window):
    return (s <= t) & (s > t - window)


@triton.jit(do_not_specialize=["splits"])
def merged_without_weights(
    parts, lse, out, splits, D: tl.constexpr, BLOCK_D: tl.constexpr, MAX_SPLITS: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)
    split, d = tl.arange(0, MAX_SPLITS), tl.arange(0, BLOCK_D)[None, :]
    part = head * splits + split
    weight = tl.where(split < splits, 1.0, 0.0)
    inside = (split < splits)[:, None] & (d < D)
    y = tl.load(parts + part[:, None] * D + d, mask=inside, other=0.0)
    y = tl.sum(weight[:, None] * y, 0) / tl.sum(weight, 0)
    d = tl.arange(0, BLOCK_D)
    tl.store(out + head * D + d, y, mask=d < D)


def gradient_over_the_logits(
    grad: Tensor, logits: Tensor, targets: Tensor, maxima: Tensor, log_sums: Tensor
) -> Tensor:
    _, T, V = logits.shape
    loss.cross_entropy_backward_kernel[(targets.numel(), triton.cdiv(V, loss.BLOCK))](
        grad.contiguous(), logits, targets, maxima, log_sums, logits, T, *logits.stride()[:2], V,
        IGNORE=IGNORE, BLOCK=loss.BLOCK,
    )  # fmt: skip
    return logits


def relaunched(file: Any, kernel: str, **changes: Callable[[dict[str, Any]], Any]) -> Launched:
    return Launched(getattr(file, kernel), **changes)


LAWS = {
    "swiglu": law_swiglu, "softmax": law_softmax, "norm": law_norm, "rope": law_rope,
    "adamw": law_adamw, "matmul": law_matmul, "int8": law_int8, "loss": law_loss,
    "attention": law_attention, "decoding": law_decoding,
}  # fmt: skip

#: The file of kernels, and what is wrong.
MUTANTS = [
    ("swiglu", "a store without a mask", "swiglu_kernel", swiglu_stores_all),
    ("swiglu", "no mask at all", "swiglu_kernel", swiglu_without_masks),
    ("swiglu", "a gradient taken as contiguous", "swiglu_backward", swiglu_gradient_as_it_lies),
    ("softmax", "padding with 0 instead of -inf", "softmax_kernel", softmax_padded_with_0),
    ("softmax", "no rescaling at a new maximum", "softmax_kernel", softmax_not_rescaled),
    ("norm", "the mean over the block, not the row", "rms_norm_kernel", norm_over_the_block),
    ("norm", "another eps", "rms_norm_kernel",
     relaunched(norm, "rms_norm_kernel", eps=lambda a: 0.1)),
    ("rope", "a gradient turned forwards", "rope_kernel",
     relaunched(rope_kernels, "rope_kernel", BACK=lambda a: False)),
    ("rope", "heads taken as one contiguous block", "rope_kernel",
     relaunched(rope_kernels, "rope_kernel", x_t=lambda a: a["HALF"] * 2,
                x_h=lambda a: a["HALF"] * 2 * a["T"])),
    ("rope", "angles of the first row for all", "rope_kernel",
     relaunched(rope_kernels, "rope_kernel", cos_b=lambda a: 0)),
    ("adamw", "eps inside the root", "adamw_kernel", adamw_eps_inside),
    ("adamw", "moments not corrected", "adamw_kernel",
     relaunched(adamw, "adamw_kernel", correction2=lambda a: 1.0)),
    ("matmul", "tiles of another group", "tile_of", tile_of_another_group),
    ("matmul", "half a tile of K without a mask", "matmul_kernel",
     relaunched(matmul, "matmul_kernel", K=lambda a: a["BLOCK_K"] * -(-a["K"] // a["BLOCK_K"]))),
    ("matmul", "float32 products in tf32", "matmul_kernel", matmul_in_tf32),
    ("int8", "one scale for every row of codes", "int8_linear_kernel",
     relaunched(int8, "int8_linear_kernel", scale_n=lambda a: 0)),
    ("loss", "tokens that do not count are counted", "cross_entropy_kernel",
     relaunched(loss, "cross_entropy_kernel", IGNORE=lambda a: IGNORE - 1)),
    ("loss", "a gradient written over the logits", "cross_entropy_backward",
     gradient_over_the_logits),
    ("attention", "the causal triangle from the first key", "sees", sees_from_the_first_key),
    ("attention", "rows loaded beyond the last", "load_rows", load_rows_beyond),
    ("decoding", "splits merged without their weights", "merge_kernel", merged_without_weights),
]  # fmt: skip

SURVIVORS = {
    "matmul: float32 products in tf32": "the interpreter has no tf32: a run on a GPU finds it",
}


def prove() -> dict[str, Any]:
    """Every mistake with the gates that find it."""
    laws = {name: gates(law) for name, law in LAWS.items()}
    same = [(Mutant(name, "kernels.device:__doc__", ""), found) for name, found in laws.items()]
    mutants = [
        (Mutant(f"{file}: {label}", f"kernels.{file}:{where}", code), laws[file])
        for file, label, where, code in MUTANTS
    ]
    return judged(same, mutants, SURVIVORS)


if __name__ == "__main__":
    show(prove())
