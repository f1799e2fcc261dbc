"""loss.py: targets that count, and a loss that is never NaN."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_gpt2, token_ids
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lm_from_scratch.text.batch import padded_batch
from lm_from_scratch.text.targets import IGNORE, next_token_targets
from lm_from_scratch.training.loss import causal_lm_loss, chunked_causal_lm_loss
from lm_from_scratch.weights.quantize import WEIGHTS


def test_targets_are_the_next_tokens() -> None:
    assert next_token_targets(torch.tensor([[5, 6, 7]])).tolist() == [[6, 7, IGNORE]]


def test_padding_is_never_a_target() -> None:
    rows = [[5, 6, 7], [8]]
    for side, want in (
        ("left", [[6, 7, IGNORE], [IGNORE, IGNORE, IGNORE]]),
        ("right", [[6, 7, IGNORE], [IGNORE, IGNORE, IGNORE]]),
    ):
        assert padded_batch(rows, 0, side).targets.tolist() == want
    inside = next_token_targets(
        torch.tensor([[5, 0, 6, 7]]), positions=torch.tensor([[0, -1, 1, 2]])
    )
    assert inside.tolist() == [[IGNORE, IGNORE, 7, IGNORE]]


def test_the_loss_of_a_padded_batch_is_the_loss_of_its_real_tokens() -> None:
    model = tiny_gpt2()
    rows = [token_ids(9).tolist(), token_ids(4, seed=2).tolist()]
    batch = padded_batch(rows, 0, "right")
    got = causal_lm_loss(model(batch.idx, positions=batch.positions), batch.targets)
    total, n = 0.0, 0
    for row in rows:
        logits = model(torch.tensor([row]))[0, :-1].double().log_softmax(-1)
        total -= sum(logits[t, token].item() for t, token in enumerate(row[1:]))
        n += len(row) - 1
    assert abs(got.item() - total / n) < 1e-5


def test_no_target_crosses_from_one_document_to_the_next() -> None:
    idx = torch.tensor([[5, 6, 7, 8, 9]])
    targets = next_token_targets(idx, positions=torch.tensor([[0, 1, 0, 1, 2]]))
    assert targets.tolist() == [[6, IGNORE, 8, 9, IGNORE]]


@pytest.mark.parametrize("bad", [-math.inf, math.nan, math.inf])
def test_ignored_logits_never_touch_the_gradient(bad: float) -> None:
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[1, IGNORE, 2], [IGNORE, 0, 4]])
    logits[targets == IGNORE] = bad
    logits.requires_grad_()
    causal_lm_loss(logits, targets).backward()
    counted = logits.detach()[targets != IGNORE].requires_grad_()
    F.cross_entropy(counted, targets[targets != IGNORE]).backward()
    assert logits.grad is not None and counted.grad is not None
    assert torch.allclose(logits.grad[targets != IGNORE], counted.grad)
    assert not logits.grad[targets == IGNORE].any()


def test_rows_of_vmap_have_the_loss_and_the_gradient_that_they_have_alone() -> None:
    logits, targets = torch.randn(3, 4, 5), torch.tensor([[1, IGNORE, 2, 0]] * 2 + [[IGNORE] * 4])
    logits[targets == IGNORE] = -math.inf
    both = torch.func.grad_and_value(causal_lm_loss)
    for got, want in zip(
        torch.func.vmap(both)(logits, targets), zip(*map(both, logits, targets)), strict=True
    ):
        torch.testing.assert_close(got, torch.stack(want))
    assert causal_lm_loss(logits.to("meta"), targets.to("meta")).shape == ()


def test_no_target_at_all_gives_zero_loss_and_zero_gradient() -> None:
    model = tiny_gpt2()
    for idx, targets in (
        (token_ids(2, 1), torch.full((2, 1), IGNORE)),
        (token_ids(2, 5), torch.full((2, 5), IGNORE)),
    ):
        model.zero_grad()
        loss = causal_lm_loss(model(idx), targets)
        assert loss.item() == 0.0
        loss.backward()
        assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


def test_uniform_logits_cost_log_v() -> None:
    loss = causal_lm_loss(torch.zeros(2, 3, 97), token_ids(2, 3))
    assert abs(loss.item() - math.log(97)) < 1e-6


def test_low_precision_logits_are_summed_in_float32() -> None:
    logits = torch.randn(1, 3000, 50, generator=torch.Generator().manual_seed(0))
    targets = token_ids(1, 3000, low=0, high=50)
    exact = causal_lm_loss(logits.double(), targets).item()
    half = causal_lm_loss(logits.half(), targets)
    assert half.dtype == torch.float32
    assert abs(half.item() - exact) < 1e-3


def test_shapes_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3, 9\), targets \(2, 4\)"):
        causal_lm_loss(torch.zeros(2, 3, 9), torch.zeros(2, 4, dtype=torch.long))


# --------------------------------------------------------------------- the loss without the logits


def head_inputs(B: int, T: int, C: int, V: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Hidden states, head and targets; about every third target does not count."""
    generator = torch.Generator().manual_seed(B + 10 * T + 100 * C + 1000 * V)
    x = torch.randn(B, T, C, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, C, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, V, (B, T), generator=generator)
    targets[torch.rand(B, T, generator=generator) < 0.3] = IGNORE
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return causal_lm_loss(F.linear(x, weight), targets)


@given(
    B=st.integers(1, 3),
    T=st.integers(1, 9),
    C=st.integers(1, 7),
    V=st.integers(1, 40),
    chunk=st.integers(1, 45),
)
def test_the_chunked_loss_and_its_gradients_are_those_of_the_plain_one(
    B: int, T: int, C: int, V: int, chunk: int
) -> None:
    x, weight, targets = head_inputs(B, T, C, V, torch.float64)
    got = chunked_causal_lm_loss(x, weight, targets, chunk)
    want = plain(x, weight, targets)
    assert got.dtype == torch.float64 and got.dim() == 0
    torch.testing.assert_close(got, want)
    for a, b in zip(
        torch.autograd.grad(3.0 * got, (x, weight)), torch.autograd.grad(3.0 * want, (x, weight))
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
def test_the_chunked_loss_passes_gradcheck(chunk: int) -> None:
    x, weight, targets = head_inputs(2, 4, 3, 11, torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, weight: chunked_causal_lm_loss(x, weight, targets, chunk), (x, weight)
    )


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_the_chunked_loss_in_float32_with_small_and_huge_logits(scale: float) -> None:
    x, weight, targets = head_inputs(2, 33, 41, 97, torch.float32)
    x = (scale * x).detach().requires_grad_()
    got, want = chunked_causal_lm_loss(x, weight, targets, 7), plain(x, weight, targets)
    torch.testing.assert_close(got, want)
    got_grads = torch.autograd.grad(got, (x, weight))
    for a, b in zip(got_grads, torch.autograd.grad(want, (x, weight))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6 * scale)


def test_the_chunked_loss_trains_a_model_with_a_tied_head_as_the_plain_one_does() -> None:
    model = tiny_gpt2()
    batch = padded_batch([token_ids(9).tolist(), token_ids(4, seed=2).tolist()], 0, "left")
    gradients = []
    for chunked in (True, False):
        model.zero_grad()
        if chunked:
            x = model.transformer(batch.idx, positions=batch.positions)
            loss = chunked_causal_lm_loss(x, model.transformer.wte.weight, batch.targets, 10)
        else:
            loss = causal_lm_loss(model(batch.idx, positions=batch.positions), batch.targets)
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Watch(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation gives back, and the dtype of each
    matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products: list[torch.dtype] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        if func.overloadpacket is torch.ops.aten.mm and result.numel():
            self.products.append(result.dtype)
        return result


def test_the_logits_are_never_held() -> None:
    B, T, C, V, chunk = 4, 50, 8, 301, 16
    x, weight, targets = head_inputs(B, T, C, V, torch.float32)
    with Watch() as seen:
        chunked_causal_lm_loss(x, weight, targets, chunk).backward()
    assert seen.largest <= max(chunk * V, V * C)
    with Watch() as seen:
        plain(x, weight, targets).backward()
    assert seen.largest == B * T * V


def test_tokens_that_do_not_count_cost_nothing() -> None:
    x, weight, _ = head_inputs(1, 400, 3, 50, torch.float32)
    targets = torch.full((1, 400), IGNORE)
    targets[0, 7:10] = torch.tensor([0, 49, 5])
    with Watch() as seen:
        chunked_causal_lm_loss(x, weight, targets, 50).backward()
    assert seen.largest == x.numel()  # its gradient; logits of all tokens would be 400 * 50
    assert x.grad.any(dim=-1).nonzero()[:, 1].tolist() == [7, 8, 9]


@pytest.mark.parametrize("frozen", [(), ("x",), ("weight",), ("x", "weight")])
def test_no_gradient_is_made_for_what_is_frozen(frozen: tuple[str, ...]) -> None:
    x, weight, targets = head_inputs(2, 6, 5, 300, torch.float64)
    want = dict(zip(("x", "weight"), torch.autograd.grad(plain(x, weight, targets), (x, weight))))
    tensors = {"x": x, "weight": weight}
    for name in frozen:
        tensors[name].requires_grad_(False)
    with Watch() as forward:
        loss = chunked_causal_lm_loss(x, weight, targets, 3)
    with Watch() as backward:
        if loss.requires_grad:
            loss.backward()
    for name, tensor in tensors.items():
        if name in frozen:
            assert tensor.grad is None
        else:
            torch.testing.assert_close(tensor.grad, want[name])
    chunks = math.ceil(int((targets != IGNORE).sum()) / 3)
    assert len(forward.products) == chunks * (3 - len(frozen))  # the logits, and the gradients
    assert backward.products == []


def test_without_gradients_only_the_loss_is_computed() -> None:
    x, weight, targets = head_inputs(2, 6, 5, 30, torch.float64)
    with Watch() as seen, torch.no_grad():
        loss = chunked_causal_lm_loss(x, weight, targets, 12)
    assert len(seen.products) == 1
    torch.testing.assert_close(loss, plain(x, weight, targets).detach())


def test_each_backward_pass_scales_the_same_gradients() -> None:
    x, weight, targets = head_inputs(2, 6, 5, 30, torch.float64)
    want = torch.autograd.grad(plain(x, weight, targets), (x, weight))
    loss = chunked_causal_lm_loss(x, weight, targets, 4)
    loss.backward(retain_graph=True)
    (-3.0 * loss).backward()
    for tensor, once in zip((x, weight), want):
        torch.testing.assert_close(tensor.grad, -2.0 * once)


def test_the_gradients_are_handed_on_without_a_copy() -> None:
    x, weight, targets = head_inputs(2, 6, 5, 30, torch.float32)
    loss = chunked_causal_lm_loss(x, weight, targets, 4)
    with Watch() as seen:
        torch.autograd.grad(loss, weight)
    assert seen.largest < weight.numel()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_of_the_chunked_loss(reentrant: bool) -> None:
    x, weight, targets = head_inputs(2, 6, 5, 30, torch.float64)
    want = torch.autograd.grad(plain(x, weight, targets), (x, weight))
    checkpoint(chunked_causal_lm_loss, x, weight, targets, 4, use_reentrant=reentrant).backward()
    for tensor, gradient in zip((x, weight), want):
        torch.testing.assert_close(tensor.grad, gradient)


def test_a_second_derivative_is_refused() -> None:
    x, weight, targets = head_inputs(1, 3, 2, 5, torch.float64)
    loss = chunked_causal_lm_loss(x, weight, targets)
    (gradient,) = torch.autograd.grad(loss.square(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("bits", [8, 4])
def test_the_chunked_loss_of_a_quantised_head(bits: int) -> None:
    x, weight, targets = head_inputs(2, 6, 64, 101, torch.float64)
    head = WEIGHTS[bits].quantize(weight)
    got = chunked_causal_lm_loss(x, head, targets, chunk=33)
    want = plain(x, head.dequantize(), targets)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, x)[0], torch.autograd.grad(want, x)[0])
    x, head = x.detach().float(), WEIGHTS[bits].quantize(weight.detach().float())
    with torch.autocast("cpu", torch.bfloat16):
        got, want = chunked_causal_lm_loss(x, head, targets, chunk=33), plain(x, head, targets)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_the_chunked_loss_under_autocast() -> None:
    x, weight, targets = head_inputs(2, 65, 40, 203, torch.float32)
    x = (0.3 * x).detach().requires_grad_()
    exact = plain(x, weight, targets)
    exact_grads = torch.autograd.grad(exact, (x, weight))
    for loss_of in (plain, lambda x, w, t: chunked_causal_lm_loss(x, w, t, 32)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(x, weight, targets)
        assert loss.dtype == torch.float32
        assert 0 < abs(loss.item() - exact.item()) < 5e-3  # it did multiply in bfloat16
        for got, want in zip(torch.autograd.grad(loss, (x, weight)), exact_grads):
            assert got.dtype == torch.float32
            assert (got - want).norm() < 2.5 * torch.finfo(torch.bfloat16).eps * want.norm()


def test_every_product_under_autocast_is_in_bfloat16() -> None:
    x, weight, targets = head_inputs(2, 6, 5, 30, torch.float32)
    with Watch() as seen:
        with torch.autocast("cpu", torch.bfloat16):
            loss = chunked_causal_lm_loss(x, weight, targets, 10)
        loss.backward()
    assert set(seen.products) == {torch.bfloat16}


def test_autocast_leaves_float64_alone() -> None:
    x, weight, targets = head_inputs(2, 5, 4, 23, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_causal_lm_loss(x, weight, targets, 8)
    torch.testing.assert_close(loss, plain(x, weight, targets))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_low_precision_model_sums_in_float32(dtype: torch.dtype) -> None:
    x, weight, targets = head_inputs(1, 60, 16, 997, dtype)
    loss = chunked_causal_lm_loss(x, weight, targets, 1)
    want = plain(x.double(), weight.double(), targets)
    assert loss.dtype == torch.float32
    bound = 2.5 * torch.finfo(dtype).eps  # of numbers in this precision; sums add nothing to it
    assert abs(loss.item() - want.item()) < bound * want.item()
    got = torch.autograd.grad(loss, (x, weight))
    for a, b in zip(got, torch.autograd.grad(want, (x, weight))):
        assert a.dtype == dtype
        assert (a - b).norm() < bound * b.norm()


def test_the_chunked_loss_of_no_target_is_zero() -> None:
    x, weight, targets = head_inputs(2, 5, 4, 23, torch.float32)
    loss = chunked_causal_lm_loss(x, weight, torch.full_like(targets, IGNORE), 8)
    loss.backward()
    assert loss.item() == 0.0
    assert (x.grad == 0).all() and (weight.grad == 0).all()


@pytest.mark.parametrize(
    ("shapes", "chunk", "message"),
    [
        (((2, 3, 4), (9, 4), (2, 3)), 0, "chunk=0 must be at least 1"),
        (((2, 3, 4), (9, 4), (2, 4)), 5, r"x has shape \(2, 3, 4\).*targets \(2, 4\)"),
        (((2, 3, 4), (9, 5), (2, 3)), 5, r"weight \(9, 5\)"),
        (((2, 3, 4), (4,), (2, 3)), 5, r"weight \(4,\)"),
    ],
)
def test_the_chunked_loss_refuses_what_does_not_fit(
    shapes: tuple[tuple[int, ...], ...], chunk: int, message: str
) -> None:
    x, weight, targets = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        chunked_causal_lm_loss(x, weight, targets.long(), chunk)


@pytest.mark.parametrize(("bad", "message"), [(9, "from 0 to 9"), (-1, "from -1 to 0")])
def test_the_chunked_loss_refuses_targets_outside_the_vocabulary(bad: int, message: str) -> None:
    targets = torch.tensor([[0, bad, IGNORE]])
    with pytest.raises(ValueError, match=f"targets run {message}; they must be below the 9 rows"):
        chunked_causal_lm_loss(torch.zeros(1, 3, 4), torch.zeros(9, 4), targets, 5)


def test_a_scaled_float16_loss_has_finite_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(1, 6, 8, generator=generator) * 0.01).half().requires_grad_()
    weight = (torch.randn(11, 8, generator=generator) * 0.01).half().requires_grad_()
    targets = torch.randint(0, 11, (1, 6), generator=generator)
    found = []
    for loss in (
        chunked_causal_lm_loss(x, weight, targets, 4),
        causal_lm_loss(F.linear(x, weight), targets),
    ):
        found.append(torch.autograd.grad(loss * 2.0**16, [x, weight]))
    for ours, want in zip(*found, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, want, rtol=0.02, atol=0.02 * want.abs().max().item())
