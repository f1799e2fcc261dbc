"""Kernels beside PyTorch, torch.compile and Liger-Kernel, and all of them beside the roof.

On a CUDA device every row of :data:`ROWS` is timed at the size of a model, and the result is
written to ``tutorials/gpu/measurements.json``, which the pages draw. Without one this says so and
ends. A finished row is written at once, into ``build/gpu``: stop whenever you like, and go on with
``--resume``. ``--smoke`` runs each row once at a tiny size, by the interpreter too, compares it
with PyTorch, and times and writes nothing.

A time is that of the GPU, between two events, from a cold cache: a gigabyte is written before each
repetition, which empties the L2 cache and gives the host time to launch what follows. The roof is
measured in the same run: a copy, and a product of two matrices.

Bytes and operations are what no implementation can do without, so none is above the roof. Inputs
are read once, and the result is written once. With the gradient, forward and backward count as one
function: its upstream gradient is read once, too, the gradients of the inputs are written once, and
nothing is read or computed again. What goes from one pass to the other, and whether it is stored
or computed again, is the choice of the implementation.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import functools
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.instruments.roofline import FILE, GPU, MARKERS, Cost
from lm_from_scratch.layers import gated_mlp, norm, rope
from lm_from_scratch.optim.adamw import adamw
from lm_from_scratch.optim.galore import galore_step
from lm_from_scratch.training import loss
from lm_from_scratch.weights import quantized_weight
from lm_from_scratch.weights.int8 import Int8Weight

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before a row imports Triton

ROOT = Path(__file__).resolve().parents[2]
REPETITIONS = 20
FLUSH = 2**30  # bytes
#: What is finished of a table.
KEPT = ROOT / "build" / "gpu" / "times.json"

Run = Callable[[], Any]
Clock = Callable[[Run], float]


@dataclass
class Row:
    """A function at one size, and who computes it: the first two are the kernel and PyTorch.

    These two are compared by what they return, or by what ``checked`` returns, where a result hides
    too much. Less ``before``: of a step in place, the change is compared.
    """

    kernel: str
    shape: str
    dtype: torch.dtype
    cost: Cost
    runs: dict[str, Run]
    checked: dict[str, Run] = field(default_factory=dict)
    before: Sequence[Tensor] = ()


@dataclass
class Setting:
    """How large the rows are, and where they are computed."""

    smoke: bool
    device: str = "cuda" if CUDA else "cpu"
    dtype: torch.dtype = torch.bfloat16 if CUDA else torch.float32
    compiles: bool = True
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(0)

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.smoke else full

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, generator=self.generator, device=self.device)
        return x.to(dtype or self.dtype)

    def ids(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator, device=self.device)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """Compiling takes most of the time of a row, and longer than a smoke run has."""

        def call(*given: Any) -> Any:  # a partial is no function to torch.compile
            return function(*given)

        return torch.compile(call, dynamic=False) if self.compiles and not self.smoke else None

    def liger(self, name: str) -> Callable[..., Any] | None:
        """A function of Liger-Kernel, where it is installed. One that it lacks fails when called,
        and is reported as all that fails."""

        def call(*given: Any) -> Any:
            from liger_kernel.transformers import functional

            return getattr(functional, f"liger_{name}")(*given)

        return None if self.smoke or not importlib.util.find_spec("liger_kernel") else call


def rows_of(
    setting: Setting,
    name: str,
    shape: str,
    functions: Sequence[Callable[..., Any] | None],
    inputs: Sequence[Tensor],
    operations: Sequence[int],
    more_bytes: int = 0,
    checked: Sequence[Run] = (),
) -> Iterable[Row]:
    """A row for a function (given as kernel, reference, Liger's), and one with its gradient.

    ``operations`` are those of each row; one means that there is no gradient. Bytes are those of
    the ``inputs``, the result and their gradients, and ``more_bytes``.
    """
    kernel, reference, liger = functions
    known = dict(zip(MARKERS, (kernel, reference, setting.compiled(reference), liger), strict=True))

    def value(function: Callable[..., Any], given: Sequence[Tensor]) -> Any:
        with torch.no_grad():
            return function(*given)

    def gradient(function: Callable[..., Any], given: Sequence[Tensor]) -> Any:
        result = function(*given)
        leaves = [x for x in given if x.requires_grad]
        return torch.autograd.grad(result, leaves, None if result.dim() == 0 else upstream)

    def row(label: str, how: Callable[..., Any], moved: Sequence[Tensor], operations: int) -> Row:
        runs: dict[str, Run] = {}
        for who, function in known.items():
            if function is not None:
                # Liger writes gradients over its inputs.
                given = [copy.deepcopy(x) for x in inputs] if who == "Liger-Kernel" else inputs
                runs[who] = functools.partial(how, function, given)
        cost = Cost(sum(x.nbytes for x in moved) + more_bytes, operations)
        return Row(label, shape, setting.dtype, cost, runs)

    result = torch.empty_like(value(reference, inputs), device="meta")
    forward = row(name, value, [*inputs, result], operations[0])
    forward.checked = dict(zip(("kernel", "torch"), checked))
    yield forward
    if len(operations) == 2:
        del forward
        inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        upstream = setting.randn(*result.shape, dtype=result.dtype)
        leaves = [x for x in inputs if x.requires_grad]
        moved = [*inputs, result, upstream, *leaves]
        yield row(f"{name} with gradient", gradient, moved, operations[1])


# -- the rows --------------------------------------------------------------------------------


def swiglu(s: Setting) -> Iterable[Row]:
    from lm_from_scratch.kernels.swiglu import swiglu as kernel

    N, C = s.size(32768, 3), s.size(4864, 37)
    gate, up = s.randn(N, C), s.randn(N, C)
    n = gate.numel()
    return rows_of(
        s, "swiglu", f"{N} x {C}", (kernel, gated_mlp.swiglu, s.liger("swiglu")), (gate, up),
        (5 * n, 11 * n),
    )  # fmt: skip


def softmax(s: Setting) -> Iterable[Row]:
    from lm_from_scratch.kernels.softmax import softmax as kernel

    def reference(x: Tensor) -> Tensor:
        return torch.softmax(x, dim=-1)

    N, C = s.size(32768, 3), s.size(4096, 37)
    x = s.randn(N, C)
    n = x.numel()
    return rows_of(
        s, "softmax", f"{N} x {C}", (kernel, reference, s.liger("softmax")), (x,), (5 * n, 9 * n)
    )


def rms_norm(s: Setting) -> Iterable[Row]:
    from lm_from_scratch.kernels.norm import rms_norm as kernel

    liger = s.liger("rms_norm")
    theirs = None if liger is None else lambda x, weight: liger(x, weight, 1e-6)
    for C in (s.size(896, 37), s.size(4096, 100)):
        N = s.size(2**28 // C // 2, 5)
        x, weight = s.randn(N, C), s.randn(C)
        n = x.numel()
        yield from rows_of(
            s, "rms_norm", f"{N} x {C}", (kernel, norm.rms_norm, theirs), (x, weight),
            (4 * n, 12 * n),
        )  # fmt: skip


def rotary(s: Setting) -> Iterable[Row]:
    from lm_from_scratch.kernels.rope import apply_rope as kernel

    B, T, H, D = s.size(32, 1), s.size(4096, 5), s.size(14, 2), s.size(64, 8)
    x = s.randn(B, T, H, D).transpose(1, 2)
    angle = s.randn(1, 1, T, D // 2, dtype=torch.float32)
    cos, sin = angle.cos(), angle.sin()

    def turn(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: function(x, cos, sin)

    return rows_of(
        s, "rope", f"{B} x {H} x {T} x {D}", (turn(kernel), turn(rope.apply_rope), None), (x,),
        (3 * x.numel(), 6 * x.numel()), more_bytes=cos.nbytes + sin.nbytes,
    )  # fmt: skip


def optimizer(s: Setting) -> Iterable[Row]:
    """A step in float32. PyTorch's is its fused one, in place as the kernel; compiled, ours."""
    from lm_from_scratch.kernels.adamw import adamw_

    shape = s.size(4864, 5), s.size(13440, 37)
    # The weights are as small as those of a model: a step must not be lost in their rounding.
    param, grad, m = (scale * s.randn(*shape, dtype=torch.float32) for scale in (0.02, 1.0, 0.1))
    v = m.square()
    cost = Cost(7 * param.nbytes, 15 * param.numel())
    theirs = torch.nn.Parameter(param.clone())
    theirs.grad = grad
    fused = torch.optim.AdamW([theirs], fused=True)
    state = fused.state[theirs]
    state.update(step=torch.zeros((), device=s.device), exp_avg=m.clone(), exp_avg_sq=v.clone())
    step = s.compiled(adamw)
    before = param.clone(), m.clone(), v.clone()

    def ours() -> tuple[Tensor, ...]:
        adamw_(param, grad, m, v, 1)
        return param, m, v

    def torch_step() -> tuple[Tensor, ...]:
        fused.step()
        return theirs.detach(), state["exp_avg"], state["exp_avg_sq"]

    runs: dict[str, Run] = {"kernel": ours, "torch": torch_step}
    if step is not None:
        runs["compiled"] = lambda: step(before[0], grad, *before[1:], 1)
    shape_text = f"{shape[0]} x {shape[1]}"
    yield Row("adamw", shape_text, torch.float32, cost, runs, before=before)


def galore(s: Setting) -> Iterable[Row]:
    """The rate of learning is 1: the change of a half-precision weight must outlive rounding."""
    from lm_from_scratch.kernels.galore import galore_step_

    m, n, r = s.size(4096, 20), s.size(11008, 37), s.size(128, 4)
    param, grad = 0.02 * s.randn(m, n), s.randn(m, n)
    left = torch.linalg.qr(s.randn(m, r, dtype=torch.float32))[0]
    first = 0.1 * s.randn(r, n, dtype=torch.float32)
    second = first.square()
    operations = 4 * m * n * r + 3 * m * n + 15 * r * n
    cost = Cost(3 * param.nbytes + 4 * first.nbytes + left.nbytes, operations)
    before = param.clone(), first.clone(), second.clone()
    step = s.compiled(galore_step)

    def ours() -> tuple[Tensor, ...]:
        galore_step_(param, grad, left, None, first, second, 1, lr=1.0)
        return param, first, second

    def theirs(function: Callable[..., Any]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return function(before[0], grad, left, None, *before[1:], 1, 1.0)

    runs: dict[str, Run] = {"kernel": ours, "torch": functools.partial(theirs, galore_step)}
    if step is not None:
        runs["compiled"] = functools.partial(theirs, step)
    yield Row("galore_step", f"{m} x {n}, rank {r}", s.dtype, cost, runs, before=before)


def matmul(s: Setting) -> Iterable[Row]:
    from lm_from_scratch.kernels.matmul import matmul as kernel

    for M, N, K in ((8192, 8192, 8192), (8192, 4864, 896)):
        M, N, K = s.size(M, 33), s.size(N, 20), s.size(K, 37)
        a, b = s.randn(M, K), s.randn(N, K).mT
        product = 2 * M * N * K
        yield from rows_of(
            s, "matmul", f"{M} x {N} x {K}", (kernel, torch.matmul, None), (a, b),
            (product, 3 * product),
        )  # fmt: skip


def int8(s: Setting) -> Iterable[Row]:
    from lm_from_scratch.kernels.int8 import linear as kernel

    N, K = s.size(8192, 33), s.size(8192, 64)
    weight = Int8Weight.quantize(s.randn(N, K))
    for M in (1, s.size(16, 5)):
        functions = (functools.partial(f, weight=weight) for f in (kernel, quantized_weight.linear))
        yield from rows_of(
            s, "int8", f"{M} x {N} x {K}", (*functions, None), (s.randn(M, K),), (2 * M * N * K,),
            more_bytes=weight.nbytes,
        )  # fmt: skip


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """In a mean over tokens, what is wrong for one of them would not be seen."""
    losses = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="none")
    return losses.view_as(targets)


def cross_entropy(s: Setting) -> Iterable[Row]:
    from lm_from_scratch.kernels import loss as kernels

    N, V = s.size(8192, 5), s.size(151936, 300)
    logits, targets = s.randn(1, N, V), s.ids(V, 1, N)
    liger = s.liger("cross_entropy")
    flat = None if liger is None else lambda x, y: liger(x.flatten(0, 1), y.flatten())
    return rows_of(
        s, "cross_entropy", f"{N} x {V}", (kernels.causal_lm_loss, loss.causal_lm_loss, flat),
        (logits, targets), (4 * N * V, 5 * N * V),
        checked=(
            lambda: kernels.cross_entropy(logits, targets)[0],
            lambda: token_losses(logits, targets),
        ),
    )  # fmt: skip


def linear_cross_entropy(s: Setting) -> Iterable[Row]:
    """Three products: the logits, and the gradients of x and of the weight."""
    from lm_from_scratch.kernels import loss as kernels

    N, V, C = s.size(8192, 5), s.size(151936, 300), s.size(896, 32)
    x, weight, targets = s.randn(1, N, C), 0.1 * s.randn(V, C), s.ids(V, 1, N)
    liger = s.liger("fused_linear_cross_entropy")
    flat = None if liger is None else lambda x, w, y: liger(x.flatten(0, 1), w, y.flatten())
    product = 2 * N * V * C
    return rows_of(
        s, "linear_cross_entropy", f"{N} x {V} x {C}",
        (kernels.chunked_causal_lm_loss, loss.chunked_causal_lm_loss, flat), (x, weight, targets),
        (product, 3 * product),
        checked=(
            lambda: kernels.linear_cross_entropy(x, weight, targets, 4096)[0],
            lambda: token_losses(x @ weight.mT, targets),
        ),
    )  # fmt: skip


def flash(s: Setting) -> Iterable[Row]:
    """Causal, then documents of about 512 tokens behind each other. Forward has 2 products for the
    visible pairs; backward has 4 more, and no need for the scores where the weights are kept."""
    from lm_from_scratch.kernels.attention import flash_attention as kernel

    for H, Hkv, D, packed in ((14, 2, 64, False), (32, 8, 128, False), (14, 2, 64, True)):
        B, T, D = s.size(4, 2), s.size(4096, 37), s.size(D, 16)
        H, Hkv = s.size(H, 4), s.size(Hkv, 2)
        positions, documents = torch.arange(T, device=s.device)[None], None
        if packed:
            begins = s.ids(T, B, T) < 8
            begins[:, 0] = True
            documents = begins.cumsum(1)
            positions = positions - torch.where(begins, positions, 0).cummax(1).values
        visibility = Visibility(positions, positions, documents, documents, dense=not packed)
        pairs = int((positions.expand(B, T) + 1).sum())
        product = 2 * H * D * pairs
        q, k, v = (s.randn(B, T, heads, D).transpose(1, 2) for heads in (H, Hkv, Hkv))
        functions = (functools.partial(f, visibility=visibility) for f in (kernel, sdpa_attention))
        yield from rows_of(
            s, "flash_attention, documents" if packed else "flash_attention",
            f"{B} x {H}/{Hkv} x {T} x {D}", (*functions, None), (q, k, v),
            (2 * product, 6 * product),
        )  # fmt: skip


def decoding(s: Setting) -> Iterable[Row]:
    """One query in each row; the keys in one tensor, whole or behind padding, then in pages of 16
    in any order."""
    from lm_from_scratch.kernels.decoding import decode_attention
    from lm_from_scratch.kernels.paged import Paged, paged_attention

    B, S, H, Hkv, D = s.size(64, 2), s.size(8192, 48), s.size(14, 4), 2, s.size(64, 16)
    seen = torch.arange(S, device=s.device)[None]
    visibility = Visibility(seen[:, -1:], seen, dense=True)
    q, k, v = s.randn(B, H, 1, D), s.randn(B, Hkv, S, D), s.randn(B, Hkv, S, D)
    shape = f"{B} x {H}/{Hkv} x {S} x {D}"
    operations = (4 * B * H * S * D,)
    functions = (
        functools.partial(f, visibility=visibility) for f in (decode_attention, sdpa_attention)
    )
    yield from rows_of(s, "decode_attention", shape, (*functions, None), (q, k, v), operations)

    padding = s.ids(S, B, 1)  # half of the keys on average, which need not be read
    real = (seen - padding).clamp(min=-1)
    padded = Visibility(real[:, -1:], real)
    hidden = int(padding.sum())
    functions = (
        functools.partial(f, visibility=padded) for f in (decode_attention, sdpa_attention)
    )
    yield from rows_of(
        s, "decode_attention, left-padded", shape, (*functions, None), (q, k, v),
        (4 * H * D * (B * S - hidden),), more_bytes=-2 * hidden * Hkv * D * k.element_size(),
    )  # fmt: skip

    pages = torch.randperm(B * S // 16, generator=s.generator, device=s.device)
    table = pages.int().view(B, S // 16)
    lengths = torch.full((B,), S, dtype=torch.int32, device=s.device)
    keys, values = s.randn(B * S, Hkv, D), s.randn(B * S, Hkv, D)

    def over_pages(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        held = (Paged(memory, table, lengths, 16, S) for memory in (keys, values))
        return paged_attention(q, *held, visibility)

    def gathered(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        held = (Paged(memory, table, lengths, 16, S).gather() for memory in (keys, values))
        return sdpa_attention(q, *held, visibility)

    yield from rows_of(
        s, "paged_attention", shape, (over_pages, gathered, None), (q, keys, values), operations,
        more_bytes=table.nbytes + lengths.nbytes,
    )  # fmt: skip


ROWS: dict[str, Callable[[Setting], Iterable[Row]]] = {
    "swiglu": swiglu,
    "softmax": softmax,
    "rms_norm": rms_norm,
    "rope": rotary,
    "adamw": optimizer,
    "galore_step": galore,
    "matmul": matmul,
    "int8": int8,
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
    "flash_attention": flash,
    "decoding": decoding,
}


# -- time ------------------------------------------------------------------------------------


class Events:
    """Seconds of a run on the GPU, which begins with an empty cache."""

    def __init__(self) -> None:
        self.flush = torch.empty(FLUSH, dtype=torch.int8, device="cuda")

    def __call__(self, run: Run) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000


def times(run: Run, clock: Clock) -> list[float]:
    """Seconds of each repetition, in four digits. What is compiled at first use is compiled."""
    for _ in range(3):
        clock(run)
    return [float(f"{clock(run):.4g}") for _ in range(REPETITIONS)]


def ceilings(clock: Clock, setting: Setting) -> dict[str, float]:
    """Bytes per second of a copy, which reads and writes, and FLOP/s of a product in bfloat16."""
    source = torch.zeros(setting.size(2**32, 2**10), dtype=torch.int8, device=setting.device)
    target = torch.empty_like(source)
    copied = statistics.median(times(lambda: target.copy_(source), clock))
    n = setting.size(8192, 16)
    a, b = (setting.randn(n, n, dtype=torch.bfloat16) for _ in range(2))
    multiplied = statistics.median(times(lambda: a @ b, clock))
    return {"copy": 2 * source.nbytes / copied, "matmul": 2 * n**3 / multiplied}


def check_agreement(row: Row) -> None:
    """A kernel that computes something else would not be worth its time."""
    runs = row.runs | row.checked
    theirs = several(runs["torch"]())
    with unwritten_is_nan():
        ours = several(runs["kernel"]())
    tolerance = 1e-4 if row.dtype == torch.float32 else 3e-2
    before = row.before or [torch.zeros((), device=x.device) for x in ours]
    for mine, their, old in zip(ours, theirs, before, strict=True):
        mine, their = (x.detach().float() - old.float() for x in (mine, their))
        worst = float((mine - their).abs().max() / their.abs().max())
        if not worst <= tolerance:
            raise AssertionError(f"{row.kernel} {row.shape} differs from torch by {worst:.2g}")


@contextlib.contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """New tensors hold NaN. They might hold the result that PyTorch has just freed, so that a
    kernel which writes nothing would agree with it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def several(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple | list) else [result]


def words(error: Exception) -> str:
    """The kind of an error, and its first line."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"


def measure(row: Row, clock: Clock) -> tuple[dict[str, Any], list[str]]:
    """The stored result of a row, and who could not be measured."""
    seconds: dict[str, list[float]] = {}
    problems = []
    for who, run in row.runs.items():
        try:
            if who == "kernel":
                check_agreement(row)
            seconds[who] = times(run, clock)
        except Exception as error:  # a missing feature of one of them is no reason to stop
            problems.append(f"{row.kernel} {row.shape}, {who}: {words(error)}")
    result = {
        "kernel": row.kernel,
        "shape": row.shape,
        "dtype": str(row.dtype).removeprefix("torch."),
        "bytes": row.cost.bytes,
        "operations": row.cost.operations,
        "seconds": seconds,
    }
    return result, problems


def line_of(result: dict[str, Any], roof: GPU) -> str:
    """The share of the roof, and how many times as long the others take (with the spread)."""
    medians = {who: statistics.median(found) for who, found in result["seconds"].items()}
    mine = result["seconds"].get("kernel")
    if mine is None:
        return f"{result['kernel']:38}{result['shape']:26} not measured"
    cost = Cost(result["bytes"], result["operations"])
    ours = medians["kernel"]
    text = f"{result['kernel']:38}{result['shape']:26}{1e6 * ours:10.1f} us "
    text += f"({min(mine) / ours - 1:+.0%} {max(mine) / ours - 1:+.0%}), "
    text += f"{cost.floor(roof) / ours:4.0%} of the roof"
    others = [who for who in medians if who != "kernel"]
    return text + "".join(f", {who} {medians[who] / ours:.2f} x" for who in others)


# -- whole models ----------------------------------------------------------------------------

PROMPT = 64


def decode_rates(
    setting: Setting, rates: list[dict[str, Any]], keep: Callable[[], None] = lambda: None
) -> list[str]:
    """Tokens per second of Qwen2-0.5B with random weights, greedy, after a prompt. They are added
    to those that ``rates`` has, and what could not be measured is returned."""
    from lm_from_scratch.checkpoint.architectures import build
    from lm_from_scratch.kernels.model import use_kernels_
    from lm_from_scratch.models.qwen2 import Qwen2Config

    tiny = dict(vocab_size=97, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, intermediate_size=48)
    config = Qwen2Config(block_size=2304, eos_token_id=None, **(tiny if setting.smoke else {}))
    torch.manual_seed(0)
    model = build(config).to(setting.device, setting.dtype).eval()
    kernels = copy.deepcopy(model)
    use_kernels_(kernels)
    n = setting.size(256, 3)
    shape = "tiny" if setting.smoke else "Qwen2-0.5B"
    known = {(rate["batch"], rate["implementation"]) for rate in rates}
    problems = []
    for batch in (1, setting.size(16, 2)):
        idx = setting.ids(config.vocab_size, batch, setting.size(PROMPT, 5))
        runs: dict[str, Callable[[], list[float]]] = {
            "eager": lambda model=model, idx=idx: greedy(model, idx, n),
            "kernels": lambda model=kernels, idx=idx: greedy(model, idx, n),
        }
        if not setting.smoke:
            for name, which in (("compiled", model), ("compiled kernels", kernels)):
                for graph in (False, True):
                    label = f"{name}, CUDA graph" if graph else name
                    runs[label] = functools.partial(static, which, idx, n, graph)
            runs["transformers"] = functools.partial(transformers_rates, model, idx, n)
        for name, run in runs.items():
            if (batch, name) in known:
                continue
            try:
                found = run()
            except Exception as error:
                problems.append(f"decoding, {name}: {words(error)}")
                continue
            rates.append({"model": shape, "batch": batch, "implementation": name,
                          "tokens_per_second": [round(rate, 1) for rate in found]})  # fmt: skip
            keep()
            if not setting.smoke:
                print(f"{shape}, batch {batch}: {statistics.median(found):9.1f} tokens/s {name}")
    return problems


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def greedy(model: Any, idx: Tensor, n: int, repetitions: int = 3) -> list[float]:
    """Tokens per second of steps behind a prompt, with a growing cache."""
    from lm_from_scratch.cache.growing import GrowingCache
    from lm_from_scratch.generation.generate import decode, prefill

    rates = []
    for _ in range(repetitions + 1):
        cache = GrowingCache(model.config.n_layer, reserve=idx.shape[1] + n)
        token = prefill(model, idx, cache).argmax(-1)
        wait()
        start = time.perf_counter()
        for _ in range(n):
            token = decode(model, token, cache).argmax(-1)
        wait()
        rates.append(len(idx) * n / (time.perf_counter() - start))
    return rates[1:]


def static(
    model: Any, idx: Tensor, n: int, graph: bool = False, repetitions: int = 3
) -> list[float]:
    """The same with a compiled step and a static cache, the step captured in a CUDA graph or not.

    Replaying a graph runs no Python, so what a step leaves in Python is kept in tensors whose
    address the graph has: the token, its place, and the cache's table of positions.
    """
    from lm_from_scratch.cache.slots import StaticCache
    from lm_from_scratch.generation.generate import prefill

    torch.compiler.reset()
    step = torch.compile(model, dynamic=False)
    B, T = idx.shape
    cache = StaticCache(model.config.n_layer, T + n + 8)
    places = torch.arange(T, device=idx.device).expand(B, -1)
    with torch.no_grad():
        first = prefill(model, idx, cache, positions=places).argmax(-1)
        filled = cache.tracks[0].positions.clone()
        token, place, table = first.clone(), places[:, -1:] + 1, filled.clone()

        def advance() -> None:
            cache.tracks[0].positions = table
            logits = step(token[:, None], positions=place, cache=cache)[:, -1]
            token.copy_(logits.argmax(-1))
            place.add_(1)
            table.copy_(cache.tracks[0].positions)

        def said(run: Callable[[], None]) -> Tensor:
            """Eight tokens, from behind the prompt."""
            rewind()
            tokens = []
            for _ in range(8):
                run()
                tokens.append(token.clone())
            return torch.stack(tokens)

        def rewind() -> None:
            token.copy_(first)
            place.fill_(T)
            table.copy_(filled)

        run, want = advance, said(advance)
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                advance()
            run = captured.replay
            if not torch.equal(said(run), want):
                raise AssertionError("the captured step says something else")
        rates = []
        for _ in range(repetitions):
            rewind()
            wait()
            start = time.perf_counter()
            for _ in range(n):
                run()
            wait()
            rates.append(B * n / (time.perf_counter() - start))
    return rates


def transformers_rates(
    model: Any, idx: Tensor, n: int, repetitions: int = 3
) -> list[float]:  # pragma: no cover - needs a GPU
    """The same by transformers with the same weights; the time of the prompt is taken off."""
    import tempfile

    import transformers

    from lm_from_scratch.checkpoint.weights import save_pretrained

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, f"{folder}/model")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            f"{folder}/model", dtype=next(model.parameters()).dtype
        )
    theirs = theirs.to(idx.device).eval()

    def seconds(tokens: int) -> float:
        wait()
        start = time.perf_counter()
        theirs.generate(
            idx, attention_mask=torch.ones_like(idx), max_new_tokens=tokens,
            min_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        wait()
        return time.perf_counter() - start

    seconds(8)
    return [len(idx) * n / (seconds(n + 1) - seconds(1)) for _ in range(repetitions)]


# -- the file --------------------------------------------------------------------------------


def said(*command: str) -> str:
    """The first line that a command prints, or "unknown"."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return (run.stdout.splitlines() or ["unknown"])[0].strip()


def provenance() -> dict[str, str]:
    import triton

    return {
        "device": torch.cuda.get_device_name() if CUDA else "none",
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": said("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"),
        "date": datetime.date.today().isoformat(),
    }


def store(path: Path, report: dict[str, Any]) -> None:
    """The whole file or nothing of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(new, path)


def started(path: Path, resume: bool) -> dict[str, Any]:
    """A report without results; or, to go on, the one that is kept of this device and these
    versions. A commit of outputs changes no time, so whether the code is the same is not asked."""
    about = provenance()
    if resume and path.is_file():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["provenance"] | {key: about[key] for key in ("date", "commit")} == about:
            return kept
        print(f"{path} is of another device or of other versions: it begins anew")
    return {"provenance": about, "ceilings": {}, "results": [], "decoding": []}


def run_rows(
    setting: Setting,
    clock: Clock,
    names: Sequence[str],
    roof: GPU,
    results: list[dict[str, Any]],
    keep: Callable[[], None] = lambda: None,
) -> list[str]:
    """Adds the rows that ``results`` lacks, and keeps it after each. What fails, in making a row
    too, does not stop the others, and is returned."""
    known = {(result["kernel"], result["shape"]) for result in results}
    problems: list[str] = []
    for name in names:
        try:
            for row in ROWS[name](setting):
                if (row.kernel, row.shape) in known:
                    continue
                torch.compiler.reset()
                result, found = measure(row, clock)
                problems += found
                print(line_of(result, roof), flush=True)
                if "kernel" in result["seconds"]:
                    results.append(result)
                    keep()
                del row
            if CUDA:
                torch.cuda.empty_cache()
        except Exception as error:
            problems.append(f"{name}, kernel: {words(error)}")
    return problems


def smoke(setting: Setting, names: Sequence[str]) -> int:
    """Each row once, and a few tokens of a tiny model."""
    count = 0
    for name in names:
        for row in ROWS[name](setting):
            check_agreement(row)
            count += 1
    rates: list[dict[str, Any]] = []
    if problems := decode_rates(setting, rates) if list(names) == list(ROWS) else []:
        raise AssertionError("; ".join(problems))
    print(f"{count} rows agree with torch, {len(rates)} models decode")
    return count


def failed(problems: Iterable[str]) -> bool:
    """Whether a kernel is missing; that another implementation is, is no reason to fail."""
    return any(", kernel:" in problem or ", kernels:" in problem for problem in problems)


def table(
    setting: Setting, clock: Clock, names: Sequence[str], options: argparse.Namespace
) -> list[str]:
    """Times what is not kept yet. A whole table goes to its place; one that lacks a kernel, or what
    is compiled, does not replace it. Returns what could not be measured."""
    report = started(options.kept, options.resume)
    about, keep = report["provenance"], functools.partial(store, options.kept, report)
    found = report["ceilings"] = report["ceilings"] or ceilings(clock, setting)
    print(about)
    print(f"copy {found['copy'] / 1e12:.2f} TB/s, matmul {found['matmul'] / 1e12:.0f} TFLOP/s")
    roof = GPU(about["device"], found["copy"], found["matmul"], found["matmul"])
    problems = run_rows(setting, clock, names, roof, report["results"], keep)
    if not options.only:
        try:
            problems += decode_rates(setting, report["decoding"], keep)
        except Exception as error:
            problems.append(f"decoding, kernels: {words(error)}")
    whole = not (options.only or options.uncompiled or failed(problems))
    if whole:
        store(options.out, report)
    print(f"written to {options.out}" if whole else f"kept in {options.kept}")
    return problems


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="run everything once, tiny, untimed")
    parser.add_argument("--only", nargs="+", choices=ROWS, help="these rows, and no whole models")
    parser.add_argument("--uncompiled", action="store_true", help="without torch.compile: minutes")
    parser.add_argument("--resume", action="store_true", help="of the same code, what is not kept")
    parser.add_argument("--kept", type=Path, default=KEPT, help="gets each row when it is finished")
    parser.add_argument("--out", type=Path, default=ROOT / FILE, help="gets a whole table")
    options = parser.parse_args(arguments)
    names = options.only or list(ROWS)
    setting = Setting(options.smoke, compiles=not options.uncompiled)
    if options.smoke:
        smoke(setting, names)
        return
    if not CUDA:
        print("No CUDA device: kernels are timed on a GPU only, by `make gpu`.")
        return
    problems = table(setting, Events(), names, options)
    for problem in problems:
        print("not measured:", problem)
    if failed(problems):
        sys.exit("a kernel could not be measured")


if __name__ == "__main__":
    main()
