r"""The cross-entropy in one pass over the logits, and fused with the head, without any logits.

Of a row of logits z with target y, the loss needs the log-sum-exp alone:

.. math::

   \mathcal{L} = \mathrm{lse} - z_y, \qquad \mathrm{lse} = \log \sum_j e^{z_j}, \qquad
   \frac{\partial \mathcal{L}}{\partial z_j} = e^{z_j - \mathrm{lse}} - [j = y]

The largest logit must be taken out of every exponential, and is known at the end only. The *online*
softmax keeps the largest so far, m, and the sum :math:`\ell` relative to it; what was summed under
a smaller maximum is put right by one factor:

.. math::

   m' = \max(m, \max_j z_j), \qquad \ell' = e^{m - m'} \ell + \sum_j e^{z_j - m'}, \qquad
   \mathrm{lse} = m + \log \ell

That last sum is never formed. Beside an m of 10,000, float32 would round :math:`\log \ell` to a
thousandth; :math:`\mathcal{L} = \log \ell - (z_y - m)` loses nothing, and so backward gets both.

:func:`causal_lm_loss` so reads the logits (N, V) once in forward; backward reads them once more and
writes their gradient: 3 tensors of traffic. PyTorch moves at least 6; and of logits in half
precision 6 of float32 and two casts, which is 6 times the bytes of the kernels.

:func:`chunked_causal_lm_loss` multiplies :math:`z = W x` itself, a tile at a time, and reduces each
tile where it was made: logits never reach memory. A program takes a part of the vocabulary, and the
parts merge as blocks do. Backward computes the tiles again, 4 products of 2 N V C
operations instead of 3, and holds the gradient of ``chunk`` logits of each token.

Sources: Milakov, Gimelshein, *Online normalizer calculation for softmax*, 2018, arXiv:1805.02867;
Hsu et al., *Liger Kernel*, 2024, arXiv:2410.10989; Wijmans et al., *Cut Your Losses in
Large-Vocabulary Language Models*, 2024, arXiv:2411.09009.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lm_from_scratch.kernels.device import check_device
from lm_from_scratch.kernels.softmax import LOWEST
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.weights.quantized_weight import QuantizedWeight

BLOCK = 4096  # logits of a row at a time: a GPU has enough other rows to wait for each other

#: Rows of the weight that one program of the fused forward takes. With the vocabulary of Qwen2, 149
#: programs share a token: enough to fill a chip with few tokens, and 149 parts to merge.
SPLIT = 1024

#: By bytes of a number: tokens, rows of the weight, and features of a tile. A larger tile needs
#: fewer bytes for each product, and more registers; these are as large as fit into the 255 of a
#: thread. In float32, operands take registers too.
TILES = {
    2: dict(BLOCK_N=64, BLOCK_V=128, BLOCK_C=64),
    4: dict(BLOCK_N=32, BLOCK_V=64, BLOCK_C=16),
}

#: In half precision, of rows that are not aligned: they are loaded number by number, and the
#: addresses take registers too.
UNALIGNED = dict(BLOCK_N=64, BLOCK_V=64, BLOCK_C=32)

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_dtypes(kernel: str, targets: Tensor, **numbers: Tensor) -> None:
    """Raises ``ValueError`` for numbers that are not floating, and targets that are not
    integers."""
    for name, tensor in numbers.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{kernel}: {name} is {tensor.dtype}; it must be floating point")
    if targets.dtype not in INTEGERS:
        raise ValueError(f"{kernel}: targets is {targets.dtype}; it must be one of {INTEGERS}")


# ------------------------------------------------------------------- the loss of logits in memory


@triton.jit(do_not_specialize=["T"])
def cross_entropy_kernel(
    logits, targets, losses, maxima, log_sums, T, stride_b, stride_t, V,
    IGNORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = logits + token // T * stride_b + token % T * stride_t
    target = tl.load(targets + token)
    if target == IGNORE:
        return  # its loss stays 0
    # not -inf: exp(-inf - m) is then 0 in a block that holds nothing else, never exp(-inf + inf)
    m = tl.full((), LOWEST, tl.float32)
    l = tl.zeros((), tl.float32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(row + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
        new_m = tl.maximum(m, tl.max(z, 0))
        l = l * tl.exp(m - new_m) + tl.sum(tl.exp(z - new_m), 0)
        m = new_m
    log_sum = tl.log(l)
    # A target outside the vocabulary cannot be refused here: it makes everything NaN.
    inside = (target >= 0) & (target < V)
    z = tl.load(row + target, mask=inside, other=float("nan")).to(tl.float32)
    tl.store(losses + token, log_sum - (z - m))
    tl.store(maxima + token, m)
    tl.store(log_sums + token, tl.where(inside, log_sum, float("nan")))


@triton.jit(do_not_specialize=["T"])
def cross_entropy_backward_kernel(
    grad, logits, targets, maxima, log_sums, grad_logits, T, stride_b, stride_t, V,
    IGNORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = logits + token // T * stride_b + token % T * stride_t
    target = tl.load(targets + token)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    counts = columns < tl.where(target == IGNORE, 0, V)
    z = tl.load(row + columns, mask=counts, other=0.0).to(tl.float32)
    p = tl.exp(z - tl.load(maxima + token) - tl.load(log_sums + token))
    dz = tl.where(columns == target, p - 1, p) * tl.load(grad + token)
    tl.store(grad_logits + token * V + columns, tl.where(counts, dz, 0.0), mask=columns < V)


def causal_lm_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """:func:`lm_from_scratch.training.loss.causal_lm_loss` of ``logits`` (..., V) and ``targets``
    (...).

    The gradient is a new tensor; the logits stay as they are. No value is read by the host, so a
    target outside the vocabulary is not refused: the loss is then NaN, and so is its gradient.

    Raises ``ValueError`` for other shapes and dtypes, and where kernels do not run.
    """
    check_device("causal_lm_loss", logits=logits, targets=targets)
    check_dtypes("causal_lm_loss", targets, logits=logits)
    if logits.dim() < 2 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"causal_lm_loss: logits have shape {tuple(logits.shape)}, targets "
            f"{tuple(targets.shape)}; they must be (..., V) and (...)"
        )
    targets = targets.long()
    return mean(cross_entropy(logits, targets)[0], targets)


def mean(losses: Tensor, targets: Tensor) -> Tensor:
    """The mean of ``losses`` over the ``targets`` (of the same shape) that count."""
    return losses.sum() / (targets != IGNORE).sum().clamp(min=1)


def batched(logits: Tensor) -> Tensor:
    """Logits (..., V) as (B, T, V) with a last stride of 1: a view, of ``logits[:, :-1]`` too."""
    logits = logits[None] if logits.dim() == 2 else logits.flatten(0, -3)
    return logits if logits.stride(-1) == 1 else logits.contiguous()


@torch.library.custom_op("lm_from_scratch::cross_entropy", mutates_args=())
def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each token, its m and its log l, in float32."""
    logits, targets = batched(logits), targets.contiguous()
    losses = torch.zeros_like(targets, dtype=torch.float32)
    maxima, log_sums = torch.zeros_like(losses), torch.zeros_like(losses)
    _, T, V = logits.shape
    cross_entropy_kernel[(targets.numel(),)](
        logits, targets, losses, maxima, log_sums, T, *logits.stride()[:2], V,
        IGNORE=IGNORE, BLOCK=BLOCK,
    )  # fmt: skip
    return losses, maxima, log_sums


@torch.library.custom_op("lm_from_scratch::cross_entropy_backward", mutates_args=())
def cross_entropy_backward(
    grad: Tensor, logits: Tensor, targets: Tensor, maxima: Tensor, log_sums: Tensor
) -> Tensor:
    grad_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    logits, targets, grad = batched(logits), targets.contiguous(), grad.contiguous()
    _, T, V = logits.shape
    cross_entropy_backward_kernel[(targets.numel(), triton.cdiv(V, BLOCK))](
        grad, logits, targets, maxima, log_sums, grad_logits, T, *logits.stride()[:2], V,
        IGNORE=IGNORE, BLOCK=BLOCK,
    )  # fmt: skip
    return grad_logits


@cross_entropy.register_fake
def _(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    losses = targets.new_empty(targets.shape, dtype=torch.float32)
    return losses, torch.empty_like(losses), torch.empty_like(losses)


@cross_entropy_backward.register_fake
def _(grad: Tensor, logits: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def keep_logits(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs, *output[1:])


def backward_to_logits(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None]:
    return cross_entropy_backward(grad, *ctx.saved_tensors), None


cross_entropy.register_autograd(backward_to_logits, setup_context=keep_logits)


# -------------------------------------------------------------- the loss of hidden states and head


@triton.jit
def logits_tile(
    x, weight, tokens, rows, N, V, C,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Some rows of W times some tokens: (BLOCK_N, BLOCK_V), in float32.

    Beyond the last token and the last row stand copies of it, which cost less than masks.
    """
    tokens, rows = tl.minimum(tokens, N - 1), tl.minimum(rows, V - 1)
    z = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start in range(0, C, BLOCK_C):
        c = (start + tl.arange(0, BLOCK_C))[None]
        x_tile = tl.load(x + tokens[:, None] * C + c, mask=c < C, other=0.0)
        w_tile = tl.load(weight + rows[:, None] * C + c, mask=c < C, other=0.0)
        z = tl.dot(x_tile, w_tile.to(x_tile.dtype).T, z, input_precision="ieee")
    return z


@triton.jit(do_not_specialize=["N"])
def linear_cross_entropy_kernel(
    x, weight, targets, maxima, sums, target_logits, N, V, C,
    SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1).to(tl.int64)
    first, end = split * SPLIT, tl.minimum(split * SPLIT + SPLIT, V)
    target = tl.load(targets + tokens, mask=tokens < N, other=-1)
    m = tl.full((BLOCK_N,), LOWEST, tl.float32)
    l = tl.zeros((BLOCK_N,), tl.float32)
    target_logit = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(first, end, BLOCK_V):
        rows = start + tl.arange(0, BLOCK_V)
        z = logits_tile(x, weight, tokens, rows, N, V, C, BLOCK_N, BLOCK_V, BLOCK_C)
        z = tl.where(rows < end, z, float("-inf"))
        new_m = tl.maximum(m, tl.max(z, 1))
        l = l * tl.exp(m - new_m) + tl.sum(tl.exp(z - new_m[:, None]), 1)
        m = new_m
        target_logit += tl.sum(tl.where(rows == target[:, None], z, 0.0), 1)
    tl.store(maxima + split * N + tokens, m, mask=tokens < N)
    tl.store(sums + split * N + tokens, l, mask=tokens < N)
    mine = (target >= first) & (target < end)
    tl.store(target_logits + tokens, target_logit, mask=mine)


@triton.jit(do_not_specialize=["N", "first"])
def linear_cross_entropy_backward_kernel(
    grad, x, weight, targets, maxima, log_sums, grad_logits, first, N, V, C, stride,
    IGNORE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    rows = first + columns
    z = logits_tile(x, weight, tokens, rows, N, V, C, BLOCK_N, BLOCK_V, BLOCK_C)
    target = tl.load(targets + tokens, mask=tokens < N, other=IGNORE)[:, None]
    m = tl.load(maxima + tokens, mask=tokens < N, other=0.0)[:, None]
    log_sum = tl.load(log_sums + tokens, mask=tokens < N, other=0.0)[:, None]
    dy = tl.load(grad + tokens, mask=tokens < N, other=0.0)[:, None]
    p = tl.exp(z - m - log_sum)
    dz = tl.where(rows == target, p - 1, p) * dy
    inside = (tokens < N)[:, None] & (columns < stride) & (rows < V)
    tl.store(
        grad_logits + tokens[:, None] * stride + columns,
        tl.where(target == IGNORE, 0.0, dz), mask=inside,
    )  # fmt: skip


def chunked_causal_lm_loss(x: Tensor, weight: Tensor, targets: Tensor, chunk: int = 4096) -> Tensor:
    """:func:`lm_from_scratch.training.loss.chunked_causal_lm_loss` of hidden states ``x`` (..., C)
    and the head ``weight`` (V, C); ``targets`` (...).

    Logits stay in float32. Backward holds the gradient of ``chunk`` logits of each token. Tokens
    that do not count are computed and masked, since to leave them out the host would have to wait
    for their number; for the same reason, a target outside the vocabulary is not refused: the loss
    is then NaN, and so are the gradients. Raises ``ValueError`` for other shapes and dtypes, a
    quantised weight, a ``chunk`` below 1, and where kernels do not run.
    """
    if isinstance(weight, QuantizedWeight):
        raise ValueError(
            f"chunked_causal_lm_loss: weight is a {type(weight).__name__}, which this kernel does "
            "not read: use lm_from_scratch.training.loss.chunked_causal_lm_loss, or "
            "weight.dequantize()"
        )
    if chunk < 1:
        raise ValueError(f"chunked_causal_lm_loss: chunk={chunk} must be at least 1")
    if x.dim() < 2 or x.shape[:-1] != targets.shape or weight.shape[1:] != x.shape[-1:]:
        raise ValueError(
            f"chunked_causal_lm_loss: x has shape {tuple(x.shape)}, weight {tuple(weight.shape)}, "
            f"targets {tuple(targets.shape)}; they must be (..., C), (V, C) and (...)"
        )
    check_device("chunked_causal_lm_loss", x=x, weight=weight, targets=targets)
    check_dtypes("chunked_causal_lm_loss", targets, x=x, weight=weight)
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            f"chunked_causal_lm_loss: x is {x.dtype}, weight {weight.dtype}; outside autocast they "
            "must agree"
        )
    # autocast may ask for products in half precision
    x = x.to(F.linear(x[:0], weight[:0]).dtype)
    check_device("chunked_causal_lm_loss", x=x)
    targets = targets.long()
    return mean(linear_cross_entropy(x, weight, targets, chunk)[0], targets)


def tile_sizes(x: Tensor, weight: Tensor) -> dict[str, int]:
    """Block sizes for ``x`` (..., C) and ``weight`` (V, C), by their dtype and alignment."""
    # what the compiler looks for: multiples of 16, of addresses and of numbers in a row alike
    aligned = all(n % 16 == 0 for n in (x.shape[-1], x.data_ptr(), weight.data_ptr()))
    return TILES[x.itemsize] if aligned or x.itemsize == 4 else UNALIGNED


@torch.library.custom_op("lm_from_scratch::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each token, its m and its log l, in float32."""
    x, weight, targets = x.contiguous(), weight.contiguous(), targets.contiguous()
    N, (V, C) = targets.numel(), weight.shape
    tile = tile_sizes(x, weight)
    splits = triton.cdiv(V, SPLIT)
    maxima = torch.empty(splits, N, dtype=torch.float32, device=x.device)
    sums = torch.empty_like(maxima)
    # stays NaN where no program finds the target: it does not count, or is outside the vocabulary
    target_logits = torch.full_like(targets, torch.nan, dtype=torch.float32)
    linear_cross_entropy_kernel[(triton.cdiv(N, tile["BLOCK_N"]), splits)](
        x, weight, targets, maxima, sums, target_logits, N, V, C, SPLIT=SPLIT, **tile
    )
    m = maxima.amax(0)
    log_sum = (sums * (maxima - m).exp()).sum(0).log().view_as(targets)
    m = m.view_as(targets)
    losses = (log_sum - (target_logits - m)).masked_fill(targets == IGNORE, 0.0)
    return losses, m, log_sum.masked_fill(losses.isnan(), torch.nan)  # and so are the gradients


@torch.library.custom_op("lm_from_scratch::linear_cross_entropy_backward", mutates_args=())
def linear_cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    maxima: Tensor,
    log_sums: Tensor,
    chunk: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight; an empty tensor stands for one that is not wanted."""
    of_x, of_weight = wanted
    shape = x.shape
    x, weight, targets = x.contiguous().flatten(0, -2), weight.contiguous(), targets.contiguous()
    grad = grad.contiguous()
    (N, C), V = x.shape, len(weight)
    tile, chunk = tile_sizes(x, weight), min(chunk, V)
    grad_logits = torch.empty(N, chunk, dtype=x.dtype, device=x.device)
    grad_x = torch.zeros(x.shape if of_x else 0, dtype=torch.float32, device=x.device)
    grad_weight = torch.empty_like(weight if of_weight else weight[:0])
    grid = (triton.cdiv(N, tile["BLOCK_N"]), triton.cdiv(chunk, tile["BLOCK_V"]))
    for first in range(0, V, chunk):
        linear_cross_entropy_backward_kernel[grid](
            grad, x, weight, targets, maxima, log_sums, grad_logits, first, N, V, C, chunk,
            IGNORE=IGNORE, **tile,
        )  # fmt: skip
        rows = weight[first : first + chunk].to(x.dtype)
        G = grad_logits[:, : len(rows)]  # (N, chunk), in the last round less
        if of_x:
            grad_x += G @ rows
        if of_weight:
            grad_weight[first : first + chunk] = G.T @ x
    return grad_x.to(x.dtype).view(shape if of_x else 0), grad_weight


@linear_cross_entropy.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    losses = targets.new_empty(targets.shape, dtype=torch.float32)
    return losses, torch.empty_like(losses), torch.empty_like(losses)


@linear_cross_entropy_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    maxima: Tensor,
    log_sums: Tensor,
    chunk: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor]:
    of_x, of_weight = wanted
    return (
        x.new_empty(x.shape if of_x else 0),
        weight.new_empty(weight.shape if of_weight else (0, weight.shape[1])),
    )


def keep_states(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.chunk = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, *output[1:])


def backward_to_states(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:2])
    grads = linear_cross_entropy_backward(grad, *ctx.saved_tensors, ctx.chunk, wanted)
    grad_x, grad_weight = (g if want else None for g, want in zip(grads, wanted, strict=True))
    return grad_x, grad_weight, None, None


linear_cross_entropy.register_autograd(backward_to_states, setup_context=keep_states)
