"""onednn.py: the same linear map, forward and backward, with another order of sums."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_run import SMALL
from tiny_models import tiny_gpt2, token_ids

from lm_from_scratch.__main__ import main
from lm_from_scratch.instruments.onednn import (
    OneDNNLinear,
    Packed,
    multiplies,
    onednn_linear,
    onednn_matmul,
    product,
    use_onednn_,
)
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.text.batch import Batch
from lm_from_scratch.training.train import optimizer_step
from lm_from_scratch.weights.quantize import quantize_


@pytest.mark.parametrize("shape", [(7,), (1, 7), (3, 5, 7), (2, 3, 5, 7)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_value_and_gradients_equal_f_linear(shape: tuple[int, ...], with_bias: bool) -> None:
    if len(shape) == 1:
        shape = (1, *shape)
    generator = torch.Generator().manual_seed(0)
    grads = []
    for f in (onednn_linear, F.linear):
        generator.manual_seed(0)
        x, w, b = (torch.randn(s, generator=generator) for s in (shape, (11, 7), (11,)))
        leaves = [x.requires_grad_(), w.requires_grad_()]
        if with_bias:
            leaves.append(b.requires_grad_())
        y = f(*leaves)
        out = torch.autograd.grad((y * y.detach().cos()).sum(), leaves)
        grads.append([y.detach(), *out])
    for ours, want in zip(*grads, strict=True):
        torch.testing.assert_close(ours, want, atol=2e-5, rtol=1e-5)


def test_strided_inputs_and_expanded_gradients() -> None:
    x = torch.randn(5, 9, 2).transpose(0, 1)[..., :1].expand(9, 5, 7).clone().transpose(0, 1)
    w = torch.randn(7, 11).T
    x.requires_grad_()
    torch.testing.assert_close(onednn_linear(x, w), F.linear(x, w), atol=2e-5, rtol=1e-5)
    (ours,) = torch.autograd.grad(onednn_linear(x, w).sum(), x)  # a gradient of stride 0
    (want,) = torch.autograd.grad(F.linear(x, w).sum(), x)
    torch.testing.assert_close(ours, want, atol=2e-5, rtol=1e-5)


def test_strides_that_onednn_does_not_follow() -> None:
    x = torch.randn(3, 5, 1376)[..., ::7].requires_grad_()
    w = torch.randn(4, 1376)[:, ::7].requires_grad_()
    want = F.linear(x, w)
    torch.testing.assert_close(onednn_linear(x, w), want, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(onednn_matmul(x[0].detach(), w.detach().T), want[0].detach())
    grad = torch.randn(3, 5, 40)[..., ::11]
    for ours, theirs in zip(
        torch.autograd.grad(onednn_linear(x, w), (x, w), grad),
        torch.autograd.grad(want, (x, w), grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_the_model_computes_and_trains_as_before() -> None:
    plain, fast = tiny_gpt2(), tiny_gpt2()
    before = [id(p) for p in fast.parameters()]
    use_onednn_(fast)
    assert [id(p) for p in fast.parameters()] == before
    assert sum(isinstance(m, OneDNNLinear) for m in fast.modules()) == 4 * 3
    idx = token_ids(2, 9)
    torch.testing.assert_close(fast(idx), plain(idx), atol=5e-5, rtol=0)
    losses = []
    for model in (plain, fast):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = Batch(idx, token_ids(2, 9, seed=2))
        losses.append([optimizer_step(model, optimizer, [batch]) for _ in range(3)])
    assert torch.tensor(losses[0]) == pytest.approx(torch.tensor(losses[1]), rel=1e-3)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.float64 on cpu"):
        use_onednn_(tiny_gpt2().double())
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16"):
        onednn_linear(torch.randn(2, 7).bfloat16(), torch.randn(3, 7))


# ------------------------------------------------------------------------------ packed weights


def test_bfloat16_is_packed_or_refused_in_one_line(monkeypatch) -> None:
    for supported in (multiplies(torch.bfloat16), False):  # what torch says here, and elsewhere
        monkeypatch.setattr(
            torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda yes=supported: yes
        )
        assert multiplies(torch.bfloat16) == supported and multiplies(torch.float32)
        if supported:
            Packed(torch.ones(4, 8).bfloat16(), 1)
            continue
        with pytest.raises(ValueError, match=r"oneDNN does not multiply torch\.bfloat16 here"):
            Packed(torch.ones(4, 8).bfloat16(), 1)
        Packed(torch.ones(4, 8), 1)  # float32 goes on


def test_oneDNN_multiplies_what_it_says_it_does() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(2, 32, dtype=dtype)
        if multiplies(dtype):
            assert torch.equal(product(x, x), torch.full((2, 2), 32, dtype=dtype))
        else:
            with pytest.raises(RuntimeError):
                product(x, x)
    assert not multiplies(torch.float64)


@torch.no_grad()
def test_a_packed_weight_gives_way_to_one_that_has_changed() -> None:
    weight, x, bias = torch.randn(5, 16), torch.randn(3, 16), torch.randn(5)
    packed = Packed(weight, 3)
    torch.testing.assert_close(packed(x, weight, bias), F.linear(x, weight, bias))
    weight.mul_(2)
    assert torch.equal(packed(x, weight, bias), F.linear(x, weight, bias))
    for other in (torch.randn(5, 16), weight.double(), weight.bfloat16()):
        assert torch.equal(packed(x.to(other), other), F.linear(x.to(other), other))
    assert copy.deepcopy(packed)(x, weight).equal(F.linear(x, weight))


def test_a_packed_weight_has_gradients_where_they_are_wanted() -> None:
    weight = torch.randn(5, 16, requires_grad=True)
    (ours,) = torch.autograd.grad(Packed(weight, 3)(torch.ones(3, 16), weight).sum(), weight)
    assert torch.equal(ours, torch.full((5, 16), 3.0))


def test_onednn_matmul_is_a_matrix_product_and_leaves_what_it_cannot_do_to_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(7, 5, generator=generator), torch.randn(5, 3, generator=generator)
    torch.testing.assert_close(onednn_matmul(a, b), a @ b, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(onednn_matmul(b.mT, a.mT), b.mT @ a.mT, atol=1e-5, rtol=1e-5)
    assert torch.equal(onednn_matmul(a.double(), b.double()), a.double() @ b.double())
    assert torch.equal(onednn_matmul(a.bfloat16(), b.bfloat16()), a.bfloat16() @ b.bfloat16())


@pytest.mark.parametrize("projection_type", ["std", "reverse_std", "full", "random"])
@pytest.mark.parametrize("fused", [False, True])
def test_galore_takes_the_same_steps_with_it(projection_type: str, fused: bool) -> None:
    weights = []
    for matmul in (torch.matmul, onednn_matmul):
        generator = torch.Generator().manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(shape, generator=generator))
            for shape in ((20, 12), (9, 30), (4, 3, 2, 2), (5,))
        ]
        options = dict(rank=4, update_proj_gap=3, projection_type=projection_type, moments="rotate")
        optimizer = GaLore(params, lr=0.01, **options, fused=fused)
        optimizer.matmul = matmul
        for _ in range(7):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        weights.append(params)
    for ours, want in zip(*weights, strict=True):
        torch.testing.assert_close(ours, want, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("more", "want"), [([], torch.matmul), (["--library", "onednn"], onednn_matmul)]
)
def test_a_run_with_onednn_has_an_optimizer_that_uses_it(tmp_path, monkeypatch, more, want) -> None:
    step, used = GaLore.step, set()

    def recorded(optimizer: GaLore, *args: Any) -> Any:
        used.add(optimizer.matmul)
        return step(optimizer, *args)

    monkeypatch.setattr(GaLore, "step", recorded)
    galore = [*SMALL, "--steps", "2", "--warmup", "1", "--optimizer", "galore", "--rank", "4"]
    assert main(["train", "--out", str(tmp_path / "run"), *galore, *more]) == 0
    assert used == {want}


def test_a_quantised_model_is_refused() -> None:
    model = tiny_gpt2()
    quantize_(model, select=lambda name: "mlp" in name)
    with pytest.raises(ValueError, match=r"h\.0\.mlp\.c_fc\.weight is quantised"):
        use_onednn_(model)


def test_a_packed_weight_knows_autocast() -> None:
    weight, x = torch.randn(5, 16), torch.randn(3, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = Packed(weight, 3)(x, weight)
        assert y.dtype == torch.bfloat16 and torch.equal(y, F.linear(x, weight))
