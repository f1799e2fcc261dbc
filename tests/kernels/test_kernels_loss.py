"""kernels/loss.py: the two losses, equal to the references in value and gradient."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kernel_checks import (
    DEVICE,
    DTYPES,
    check,
    check_compiled,
    check_operator,
    each_dtype_of_which_float16_is_slow,
    numbers,
    poisoned,
    strided,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lm_from_scratch.kernels import loss as kernels
from lm_from_scratch.kernels.loss import (
    SPLIT,
    TILES,
    UNALIGNED,
    causal_lm_loss,
    chunked_causal_lm_loss,
    cross_entropy,
    linear_cross_entropy,
    tile_sizes,
)
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training import loss as reference
from lm_from_scratch.weights.quantize import WEIGHTS

HALF = DTYPES[-1]


def targets_of(*shape: int, V: int) -> Tensor:
    """Targets, about every third of which does not count; the first is the last token there is."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, V, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.3] = IGNORE
    targets.view(-1)[:1] = V - 1
    return targets


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    tensors = [numbers(*shape, seed=s).detach() for s, shape in enumerate(shapes)]
    return [x.to(DEVICE, dtype).requires_grad_() for x in tensors]


# -------------------------------------------------------------------------- logits in memory


@each_dtype_of_which_float16_is_slow
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 5, 301), (2, 2, 2, 37), (3, 4099)], ids=str)
def test_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """4099 logits are more than one block."""
    targets = targets_of(*shape[:-1], V=shape[-1])
    check(causal_lm_loss, reference.causal_lm_loss, numbers(*shape), targets, dtype=dtype)


@each_dtype_of_which_float16_is_slow
@pytest.mark.parametrize(
    "layout",
    [
        strided,
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 2 else strided(x),
        lambda x: torch.cat([x, x[:, -1:]], 1)[:, :-1],
        lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    ],
    ids=["transposed", "tokens first", "without the last token", "part of the vocabulary"],
)
def test_takes_any_strides(layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    targets = targets_of(3, 5, V=37)
    check(
        causal_lm_loss, reference.causal_lm_loss, numbers(3, 5, 37), targets, dtype=dtype,
        layout=layout,
    )  # fmt: skip


def test_logits_that_lack_only_their_last_token_are_not_copied() -> None:
    (logits,) = leaves((3, 5, 37))
    view = kernels.batched(logits[:, :-1])
    assert view.data_ptr() == logits.data_ptr() and view.stride() == logits.stride()


@each_dtype_of_which_float16_is_slow
def test_logits_in_half_precision_are_exact(dtype: torch.dtype) -> None:
    """They are cast up before anything is computed; only the gradient is rounded."""
    (logits,) = leaves((3, 5, 301), dtype=dtype)
    targets = targets_of(3, 5, V=301).to(DEVICE)
    got = causal_lm_loss(logits, targets)
    exact = logits.detach().float().requires_grad_()
    want = reference.causal_lm_loss(exact, targets)
    torch.testing.assert_close(got, want)
    (a,), (b,) = torch.autograd.grad(got, logits), torch.autograd.grad(want, exact)
    torch.testing.assert_close(a, b.to(dtype))


@each_dtype_of_which_float16_is_slow
def test_huge_logits(dtype: torch.dtype) -> None:
    """exp() of any of them, or of their distance, would overflow or vanish."""
    logits = numbers(4, 5000, scale=3000.0)
    check(causal_lm_loss, reference.causal_lm_loss, logits, targets_of(4, V=5000), dtype=dtype)


@each_dtype_of_which_float16_is_slow
@pytest.mark.parametrize("offset", [100.0, 1e4, -1e4])
def test_logits_with_a_common_offset(offset: float, dtype: torch.dtype) -> None:
    """It changes neither the loss nor the gradient, so it may cost no digits; near 10,000, float32
    knows a log-sum-exp to a thousandth."""
    logits = (numbers(30, 50).detach() + offset).requires_grad_()
    targets = targets_of(30, V=50)
    check(causal_lm_loss, reference.causal_lm_loss, logits, targets, dtype=dtype)


def test_the_lowest_logits() -> None:
    """The running maximum starts at no more than the lowest finite number."""
    lowest = torch.finfo(torch.float32).min
    logits = torch.full((2, 50), lowest, device=DEVICE, requires_grad=True)
    x = torch.ones(2, 1, device=DEVICE)
    weight = torch.full((50, 1), lowest, device=DEVICE, requires_grad=True)
    targets = torch.tensor([0, 49], device=DEVICE)
    with poisoned():
        plain = causal_lm_loss(logits, targets)
        fused = chunked_causal_lm_loss(x, weight, targets)
        (of_logits,) = torch.autograd.grad(plain, logits)
        (of_weight,) = torch.autograd.grad(fused, weight)
    want = (1 / 50 - F.one_hot(targets, 50)) / 2
    torch.testing.assert_close(plain, torch.tensor(50.0, device=DEVICE).log())
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(of_logits, want)
    torch.testing.assert_close(of_weight, want.sum(0)[:, None])


def test_excluded_tokens() -> None:
    """Logits of -inf, a whole first block of them too: as the reference, wherever it is finite."""
    logits = numbers(3, 4200).detach().float()
    logits[0, :4100] = -torch.inf
    logits[1, 7] = -torch.inf  # also the target: its surprise is infinite, its gradient is not
    logits[2] = -torch.inf
    targets = torch.tensor([4199, 7, IGNORE])
    logits, targets = logits.to(DEVICE).requires_grad_(), targets.to(DEVICE)
    for rows in (slice(0, 1), slice(0, 2)):
        with poisoned():
            got = causal_lm_loss(logits[rows], targets[rows])
            (a,) = torch.autograd.grad(got, logits)
        want = reference.causal_lm_loss(logits[rows], targets[rows])
        (b,) = torch.autograd.grad(want, logits)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(a, b)
    with poisoned():  # the reference gives NaN for a row that holds nothing, though it is ignored
        got = causal_lm_loss(logits[2:], targets[2:])
        (a,) = torch.autograd.grad(got, logits)
    assert got == 0 and not a.any()


# -------------------------------------------------------------------------- both


def logits_and_targets(V: int, *rows: int) -> tuple[list[Tensor], Tensor]:
    return leaves((*rows, V)), targets_of(*rows, V=V).to(DEVICE)


def states_and_targets(V: int, *rows: int) -> tuple[list[Tensor], Tensor]:
    return leaves((*rows, 19), (V, 19)), targets_of(*rows, V=V).to(DEVICE)


both = pytest.mark.parametrize(
    ("loss", "inputs"),
    [(causal_lm_loss, logits_and_targets), (chunked_causal_lm_loss, states_and_targets)],
    ids=["plain", "chunked"],
)


@both
def test_no_target_at_all(loss: Callable[..., Tensor], inputs: Callable[..., Tensor]) -> None:
    for rows in ((2, 3), (0, 3)):
        tensors, targets = inputs(37, *rows)
        with poisoned():
            got = loss(*tensors, torch.full_like(targets, IGNORE))
            gradients = torch.autograd.grad(got, tensors)
        assert got == 0 and got.dtype == torch.float32
        assert all(g.shape == x.shape and not g.any() for g, x in zip(gradients, tensors))


@both
@pytest.mark.parametrize("bad", [37, 127, 2**40, -1, -101])
def test_a_target_outside_the_vocabulary_is_seen(
    loss: Callable[..., Tensor], inputs: Callable[..., Tensor], bad: int
) -> None:
    """Within the padding of a block or beyond it, the loss is NaN, never a number; so are the
    gradients of that token, of the others only those of the weight."""
    tensors, targets = inputs(37, 2, 3)
    targets[1, 1] = bad
    with poisoned():
        got = loss(*tensors, targets)
        of_states, *of_weight = torch.autograd.grad(got, tensors)
    assert got.isnan()
    assert of_states.isnan().all(-1).nonzero().tolist() == [[1, 1]]
    assert of_states[0, 0].any()
    assert all(g.isnan().all() for g in of_weight)


@both
def test_the_upstream_gradient_is_read_on_the_device(
    loss: Callable[..., Tensor], inputs: Callable[..., Tensor]
) -> None:
    """A loss may be scaled before backward; nothing asks a tensor for its value."""

    class NoValues(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore
            names = ("_local_scalar_dense", "nonzero", "index.Tensor", "masked_select", "equal")
            assert not any(name in str(func) for name in names), func
            return func(*args, **(kwargs or {}))

    tensors, targets = inputs(37, 2, 3)
    with NoValues():
        got = loss(*tensors, targets)
        scaled = torch.autograd.grad(got * 4096.0, tensors, retain_graph=True)
        gradients = torch.autograd.grad(got, tensors)
    for a, b in zip(scaled, gradients):
        torch.testing.assert_close(a, 4096 * b)


@both
def test_no_second_derivative(loss: Callable[..., Tensor], inputs: Callable[..., Tensor]) -> None:
    tensors, targets = inputs(37, 2, 3)
    got = loss(*tensors, targets)
    gradients = torch.autograd.grad(got, tensors, create_graph=True)
    with pytest.raises(RuntimeError):
        gradients[0].sum().backward()


# -------------------------------------------------------------------------- hidden states and head


@each_dtype_of_which_float16_is_slow
@pytest.mark.parametrize(
    ("rows", "V", "C", "chunk"),
    [
        ((3, 17), 2, 1, 1),
        ((1, 1), 301, 37, 301),
        ((3, 15), 301, 37, 97),
        ((2, 2, 3), 131, 16, 10_000),
        ((5,), SPLIT + 3, 70, 600),
    ],
    ids=str,
)
def test_the_fused_loss_equals_the_reference(
    rows: tuple[int, ...], V: int, C: int, chunk: int, dtype: torch.dtype
) -> None:
    """More than a tile of tokens, rows and features, and more than a split. Logits have the size
    that those of a model have: with larger ones each processor rounds in its own way."""
    x, weight = numbers(*rows, C), numbers(V, C, seed=1, scale=C**-0.5)
    check(
        chunked_causal_lm_loss, reference.chunked_causal_lm_loss,
        x, weight, targets_of(*rows, V=V), chunk, dtype=dtype,
    )  # fmt: skip


@each_dtype_of_which_float16_is_slow
def test_the_fused_loss_takes_any_strides(dtype: torch.dtype) -> None:
    x, weight = numbers(3, 15, 37), numbers(301, 37, seed=1)
    check(
        chunked_causal_lm_loss, reference.chunked_causal_lm_loss,
        x, weight, targets_of(3, 15, V=301), 97, dtype=dtype, layout=strided,
    )  # fmt: skip


@each_dtype_of_which_float16_is_slow
def test_the_fused_loss_of_huge_logits(dtype: torch.dtype) -> None:
    """Up to about 2,000: exp() of any of them, or of their distance, would overflow or vanish. So
    would that of the distance of two splits."""
    V = SPLIT + 7
    x, weight = numbers(2, 3, 16, scale=50.0), numbers(V, 16, seed=1, scale=4.0)
    check(
        chunked_causal_lm_loss, reference.chunked_causal_lm_loss,
        x, weight, targets_of(2, 3, V=V), 600, dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize("offset", [100.0, 1e4])
def test_the_fused_loss_of_logits_with_a_common_offset(offset: float) -> None:
    """Against the loss of logits in memory: the fused reference keeps a rounded log-sum-exp. The
    products are exact, so that it is the sums that are judged; the vocabulary is two splits."""
    V = SPLIT + 50
    x = torch.stack([torch.full((5,), offset), torch.ones(5)], 1).double().requires_grad_()
    small = (numbers(V, 1, seed=1).detach() * 1024).round() / 1024
    weight = torch.cat([torch.ones(V, 1), small], 1).requires_grad_()
    check(
        chunked_causal_lm_loss, lambda x, w, t: reference.causal_lm_loss(F.linear(x, w), t),
        x, weight, targets_of(5, V=V), dtype=torch.float32,
    )  # fmt: skip


def test_the_tile_fits_the_rows() -> None:
    """Rows that are not aligned take more registers: see compile_kernels.py."""
    x, weight = leaves((33, 64), (99, 64), dtype=HALF)
    assert tile_sizes(x, weight) == TILES[2]
    for rows in ((x[:, :63], weight[:, :63]), (x.flatten()[1:-63].view(32, 64), weight)):
        assert tile_sizes(*rows) == UNALIGNED
    assert tile_sizes(x, weight.flatten()[8:-56].view(98, 64)) == TILES[2]
    assert tile_sizes(x[:, :63].float(), weight[:, :63].float()) == TILES[4]


def test_the_logits_are_not_rounded() -> None:
    """Half precision enters with x and the weight alone: the loss is that of exact products."""
    x, weight = leaves((40, 37), (301, 37), dtype=HALF)
    targets = targets_of(40, V=301).to(DEVICE)
    exact = reference.chunked_causal_lm_loss(x.double(), weight.double(), targets).float()
    torch.testing.assert_close(chunked_causal_lm_loss(x, weight, targets), exact)
    rounded = reference.chunked_causal_lm_loss(x, weight, targets)
    assert abs(rounded - exact) > 1e-5


def test_the_gradient_of_the_states_is_summed_in_float32() -> None:
    """19 of these 20 chunks add less than half precision would notice beside the first."""
    weight = torch.full((20, 1), 0.15)
    weight[0] = -20.0
    check(
        chunked_causal_lm_loss, reference.chunked_causal_lm_loss,
        numbers(1, 1, scale=0.0), weight.double(), torch.tensor([0]), 1, dtype=HALF,
    )  # fmt: skip


class Largest(TorchDispatchMode):
    """The size of the largest tensor of floating point that any operation outside the kernels gives
    back, and the number of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.size = max(self.size, tensor.numel())
        self.products += func is torch.ops.aten.mm.default
        return result


def test_the_logits_are_never_held() -> None:
    """What the operators allocate is seen by calling their own functions, not the operators."""
    N, C, V, chunk = 150, 8, 301, 16
    x, weight = leaves((N, C), (V, C))
    targets = targets_of(N, V=V).to(DEVICE)
    forward = linear_cross_entropy._init_fn
    backward = kernels.linear_cross_entropy_backward._init_fn
    with Largest() as seen, torch.no_grad():
        losses, *sums = forward(x, weight, targets, chunk)
        assert seen.products == 0
        grads = backward(torch.ones_like(losses), x, weight, targets, *sums, chunk, [True, True])
    assert seen.size <= max(N * chunk, V * C) < N * V / 10
    assert seen.products == 2 * math.ceil(V / chunk)
    assert all(g.shape == x.shape and g.any() for g, x in zip(grads, (x, weight)))


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_no_gradient_is_made_for_what_is_frozen(frozen: str) -> None:
    x, weight = leaves((2, 6, 5), (300, 5))
    targets = targets_of(2, 6, V=300).to(DEVICE)
    full = torch.autograd.grad(chunked_causal_lm_loss(x, weight, targets, 60), (x, weight))
    want = dict(zip(("x", "weight"), full))
    tensors = {"x": x, "weight": weight}
    tensors[frozen].requires_grad_(False)
    chunked_causal_lm_loss(x, weight, targets, 60).backward()
    for name, tensor in tensors.items():
        if name == frozen:
            assert tensor.grad is None
        else:
            assert tensor.grad is not None and torch.equal(tensor.grad, want[name])
    zeros = torch.zeros(2, 6, device=DEVICE)
    wanted = [frozen != "x", frozen != "weight"]
    grads = kernels.linear_cross_entropy_backward(
        zeros, x.detach(), weight.detach(), targets, zeros, zeros, 60, wanted
    )
    assert [bool(g.numel()) for g in grads] == wanted


def test_the_fused_loss_under_autocast() -> None:
    """Products in half precision, gradients in the dtype of x and of the weight."""
    x, weight = leaves((2, 33, 20), (203, 20))
    targets = targets_of(2, 33, V=203).to(DEVICE)
    results = []
    for loss_of in (chunked_causal_lm_loss, reference.chunked_causal_lm_loss):
        with torch.autocast(DEVICE, HALF):
            loss = loss_of(x, weight, targets, 32)
        results.append([loss.detach(), *torch.autograd.grad(loss, (x, weight))])
    exact = reference.chunked_causal_lm_loss(x, weight, targets)
    results.append([exact.detach(), *torch.autograd.grad(exact, (x, weight))])
    for ours, theirs, want in zip(*results):
        assert ours.dtype == theirs.dtype == torch.float32
        assert 0 < (ours - want).norm() <= 2 * (theirs - want).norm() + 1e-6


# -------------------------------------------------------------------------- as operators of torch


@pytest.mark.slow
def test_are_operators() -> None:
    targets = targets_of(2, 3, V=37).to(DEVICE)
    (logits,) = leaves((2, 3, 37))
    x, weight = leaves((2, 3, 5), (37, 5))
    with np.errstate(all="ignore"):  # torch tries targets that are not in the vocabulary
        check_operator(cross_entropy, logits, targets)
        check_operator(cross_entropy, strided(logits), targets)
        check_operator(linear_cross_entropy, x, weight, targets, 20)
    check_compiled(causal_lm_loss, logits, targets)
    check_compiled(chunked_causal_lm_loss, x, weight, targets, 20)
    check_compiled(chunked_causal_lm_loss, x, weight.detach(), targets, 20)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((2, 3, 9), (2, 4)), "logits have shape (2, 3, 9), targets (2, 4)"),
        (((9,), ()), "logits have shape (9,)"),
        (((2, 3, 4), (9, 4), (2, 4)), "x has shape (2, 3, 4), weight (9, 4), targets (2, 4)"),
        (((2, 3, 4), (9, 5), (2, 3)), "weight (9, 5)"),
        (((2, 3, 4), (4,), (2, 3)), "weight (4,)"),
    ],
)
def test_refuses_shapes(shapes: tuple[tuple[int, ...], ...], words: str) -> None:
    tensors = [torch.zeros(shape, device=DEVICE) for shape in shapes]
    tensors[-1] = tensors[-1].long()
    loss: Callable[..., Tensor] = causal_lm_loss if len(shapes) == 2 else chunked_causal_lm_loss
    with pytest.raises(ValueError, match="causal_lm_loss: ") as error:
        loss(*tensors)
    assert words in str(error.value)


def test_refuses() -> None:
    x, weight = leaves((2, 3, 64), (9, 64))
    targets = torch.zeros(2, 3, dtype=torch.long, device=DEVICE)
    with pytest.raises(ValueError, match="chunk=0 must be at least 1"):
        chunked_causal_lm_loss(x, weight, targets, 0)
    with pytest.raises(ValueError, match=r"x is torch\.float64; kernels compute"):
        chunked_causal_lm_loss(x.double(), weight.double(), targets)
    with pytest.raises(ValueError, match=r"logits is torch\.float64; kernels compute"):
        causal_lm_loss(x.double(), targets)
    with pytest.raises(ValueError, match="weight on meta; they must be on one"):
        chunked_causal_lm_loss(x, weight.to("meta"), targets)
    with pytest.raises(
        ValueError, match=r"x is torch\.float16, weight torch\.float32; outside auto"
    ):
        chunked_causal_lm_loss(x.half(), weight, targets)
    for wrong in (torch.bool, torch.int64, torch.complex64):
        with pytest.raises(ValueError, match=f"causal_lm_loss: logits is {wrong}"):
            causal_lm_loss(x.detach().to(wrong), targets)
        with pytest.raises(ValueError, match=f"chunked_causal_lm_loss: weight is {wrong}"):
            chunked_causal_lm_loss(x, weight.detach().to(wrong), targets)
    for wrong in (torch.float32, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match=f"targets is {wrong}"):
            causal_lm_loss(x, targets.to(wrong))
        with pytest.raises(ValueError, match=f"targets is {wrong}"):
            chunked_causal_lm_loss(x, weight, targets.to(wrong))
    head = WEIGHTS[8].quantize(weight.detach())
    with pytest.raises(ValueError, match=rf"weight is a {type(head).__name__}.*dequantize"):
        chunked_causal_lm_loss(x, head, targets)
