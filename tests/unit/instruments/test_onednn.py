"""onednn.py: the same linear map, forward and backward, with another order of sums."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_run import SMALL
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.__main__ import main
from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.instruments.onednn import (
    OneDNNLinear,
    PackedLinear,
    bfloat16_is_native,
    multiplies,
    onednn_linear,
    onednn_matmul,
    product,
    use_onednn_,
    use_packed_weights_,
)
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.text.batches import Batch
from lm_from_scratch.training.train import TrainConfig, optimizer_step
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
        losses.append(
            [optimizer_step(model, optimizer, [batch], TrainConfig(steps=1)) for _ in range(3)]
        )
    assert torch.tensor(losses[0]) == pytest.approx(torch.tensor(losses[1]), rel=1e-3)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.float64 on cpu"):
        use_onednn_(tiny_gpt2().double())
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16"):
        onednn_linear(torch.randn(2, 7).bfloat16(), torch.randn(3, 7))


# ------------------------------------------------------------------------------ packed weights


def tied_qwen2():
    return tiny_qwen2(tie_word_embeddings=True)


BFLOAT16 = pytest.mark.skipif(not multiplies(torch.bfloat16), reason="not on this processor")


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BFLOAT16)])
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen2, tied_qwen2])
def test_packed_weights_give_the_same_logits_and_text(make, dtype: torch.dtype) -> None:
    plain, packed = make().to(dtype), make().to(dtype)
    before = {name: (id(p), p.clone()) for name, p in packed.named_parameters()}
    use_packed_weights_(packed, rows=2)
    assert all(torch.equal(p, before[name][1]) for name, p in packed.named_parameters())
    assert all(id(p) == before[name][0] for name, p in packed.named_parameters())
    idx = token_ids(2, 9)
    with torch.no_grad():
        atol = 5e-5 if dtype == torch.float32 else 0.3
        torch.testing.assert_close(packed(idx), plain(idx), atol=atol, rtol=0.02)
    if dtype == torch.float32:
        prompts = [[5, 6, 7], [8]]
        assert complete(generate(packed, prompts, 20, GREEDY)) == complete(
            generate(plain, prompts, 20, GREEDY)
        )


def test_C2_bfloat16_is_packed_or_refused_in_one_line(monkeypatch) -> None:
    for supported in (multiplies(torch.bfloat16), False):  # what torch says here, and elsewhere
        monkeypatch.setattr(
            torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda yes=supported: yes
        )
        assert multiplies(torch.bfloat16) == supported and multiplies(torch.float32)
        model = tiny_gpt2().bfloat16()
        if supported:
            use_packed_weights_(model)
            continue
        with pytest.raises(ValueError, match=r"bfloat16, which oneDNN does not .* this processor"):
            use_packed_weights_(model)
        assert not any(isinstance(module, PackedLinear) for module in model.modules())
        use_packed_weights_(tiny_gpt2())  # float32 goes on


def test_C1_oneDNN_multiplies_what_it_says_it_does() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(2, 32, dtype=dtype)
        if multiplies(dtype):
            assert torch.equal(product(x, x), torch.full((2, 2), 32, dtype=dtype))
        else:
            with pytest.raises(RuntimeError):
                product(x, x)
    assert not multiplies(torch.float64)


@pytest.mark.parametrize("name", [None, "avx512_bf16", "amx_bf16", "bf16"])
def test_C4_bfloat16_is_native_where_the_processor_and_oneDNN_have_it(name, monkeypatch) -> None:
    has = {"architecture": "any", "avx2": True} | ({name: True} if name else {})
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    for supported in (True, False):
        monkeypatch.setattr(
            torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda yes=supported: yes
        )
        assert bfloat16_is_native() == (supported and name is not None)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not bfloat16_is_native() and not multiplies(torch.float32)


def test_packed_weights_that_changed_are_refused_until_they_are_packed_again() -> None:
    model, idx = tiny_gpt2(), token_ids(1, 4)
    use_packed_weights_(model)
    other = tiny_gpt2(seed=1)
    with torch.no_grad():
        old = model(idx)
        model.load_state_dict(other.state_dict())
        with pytest.raises(ValueError, match="has changed since it was packed"):
            model(idx)
        use_packed_weights_(model)
        torch.testing.assert_close(model(idx), other(idx), atol=5e-5, rtol=0)
        assert not torch.allclose(model(idx), old)
        model.bfloat16()
        with pytest.raises(ValueError, match="has changed since it was packed"):
            model(idx)


def test_packed_weights_are_for_inference() -> None:
    model = tiny_gpt2()
    use_packed_weights_(model)
    with pytest.raises(ValueError, match="no gradients"):
        model(token_ids(1, 4))
    layer = model.transformer.h[0].attn.c_attn
    with torch.no_grad(), pytest.raises(ValueError, match=r"bfloat16, the packed weight .*float32"):
        layer(torch.ones(1, 28).bfloat16())
    for bad, message in (
        (lambda: use_packed_weights_(tiny_gpt2(), rows=0), "rows=0"),
        (lambda: use_packed_weights_(tiny_gpt2().double()), "float64 on cpu"),
        (lambda: use_packed_weights_(tiny_gpt2().to("meta")), "on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()


def test_a_packed_model_is_saved_like_any_other(tmp_path) -> None:
    model = tiny_gpt2()
    use_packed_weights_(model)
    save_pretrained(model, tmp_path / "m")
    want = tiny_gpt2().state_dict()
    assert all(
        torch.equal(want[k], t) for k, t in from_pretrained(tmp_path / "m").state_dict().items()
    )


def test_onednn_matmul_is_a_matrix_product_and_leaves_what_it_cannot_do_to_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(7, 5, generator=generator), torch.randn(5, 3, generator=generator)
    torch.testing.assert_close(onednn_matmul(a, b), a @ b, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(onednn_matmul(b.mT, a.mT), b.mT @ a.mT, atol=1e-6, rtol=1e-6)
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


@pytest.mark.parametrize(("more", "want"), [([], torch.matmul), (["--onednn"], onednn_matmul)])
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
    for change in (use_onednn_, use_packed_weights_):
        with pytest.raises(ValueError, match=r"h\.0\.mlp\.c_fc\.weight is quantised"):
            change(model)
    assert all(type(module) is not PackedLinear for module in model.modules())
