"""activation.py: the formulas and the fused kernels that the models call."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_gpt2, tiny_hf, token_ids

from lm_from_scratch.checkpoint.weights import from_pretrained
from lm_from_scratch.layers.activation import ACTIVATIONS, gelu, gelu_new
from lm_from_scratch.layers.gated_mlp import GatedMLP, SwiGLUFunction, swiglu
from lm_from_scratch.models.gpt2 import GPT2Config

X = torch.linspace(-8, 8, 1001, dtype=torch.float64)


@pytest.mark.parametrize(("formula", "name"), [(gelu, "gelu"), (gelu_new, "gelu_new")])
def test_kernel_equals_formula_in_value_and_gradient(formula, name) -> None:
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    a, b = formula(x), ACTIVATIONS[name](y)
    torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    a.sum().backward()
    b.sum().backward()
    torch.testing.assert_close(x.grad, y.grad, atol=1e-12, rtol=0)


def test_the_two_gelus_differ_by_less_than_their_docstring_says() -> None:
    difference = (gelu(X) - gelu_new(X)).abs().max().item()
    assert 4e-4 < difference < 5e-4


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "relu", "silu"])
def test_the_config_decides_the_activation(name: str, tmp_path) -> None:
    twin = tiny_hf(activation_function=name)
    twin.save_pretrained(tmp_path / "m")
    ours = from_pretrained(tmp_path / "m")
    idx = token_ids(2, 12)
    torch.testing.assert_close(ours(idx), twin(idx).logits, atol=5e-5, rtol=0)
    assert ours.config.activation == name


def test_the_default_is_the_tanh_gelu_of_gpt2() -> None:
    assert GPT2Config().activation == "gelu_new"
    default, exact = tiny_gpt2(), tiny_gpt2(activation="gelu")
    idx = token_ids(2, 12)
    assert 1e-4 < (default(idx) - exact(idx)).abs().max() < 1e-1
    assert F.gelu(X).ne(F.gelu(X, approximate="tanh")).any()


def test_an_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"activation='swish7' is not one of"):
        GPT2Config(activation="swish7")


def test_swiglu_equals_its_formula_in_value_and_gradient() -> None:
    leaves = [torch.randn(3, 7, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    gate, up = leaves
    torch.testing.assert_close(swiglu(gate, up), gate / (1 + torch.exp(-gate)) * up)
    for function in (swiglu, SwiGLUFunction.apply):
        assert torch.autograd.gradcheck(function, leaves)
    assert torch.equal(SwiGLUFunction.apply(gate, up), swiglu(gate, up))
    assert (swiglu(gate, up) - swiglu(up, gate)).abs().max() > 0.1  # which is the gate matters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_swiglu_by_hand_keeps_less_and_has_the_automatic_gradient(dtype) -> None:
    results = []
    for function in (swiglu, SwiGLUFunction.apply):
        generator = torch.Generator().manual_seed(0)
        leaves = [
            torch.randn(3, 7, generator=generator).to(dtype).requires_grad_() for _ in range(2)
        ]
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.append(t.data_ptr()) or t, lambda t: t
        ):
            y = function(*leaves)
        y.square().sum().backward()
        results.append((len(set(kept)), y, *(leaf.grad for leaf in leaves)))
    assert (results[0][0], results[1][0]) == (3, 2)
    for automatic, by_hand in zip(results[0][1:], results[1][1:], strict=True):
        assert by_hand.dtype == dtype
        torch.testing.assert_close(by_hand, automatic)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_new", "relu"])
def test_the_gated_mlp_equals_that_of_transformers(activation: str) -> None:
    from transformers import Qwen2Config as HFConfig
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    theirs = Qwen2MLP(HFConfig(hidden_size=12, intermediate_size=20, hidden_act=activation))
    ours = GatedMLP(12, 20, activation)
    ours.load_state_dict(theirs.state_dict())
    x, y = (torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    a, b = ours(x.requires_grad_()), theirs(y.requires_grad_())
    torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    a.sum().backward()
    b.sum().backward()
    torch.testing.assert_close(x.grad, y.grad, atol=1e-6, rtol=0)
    if activation == "silu":
        torch.testing.assert_close(a, ours.down_proj(swiglu(ours.gate_proj(x), ours.up_proj(x))))
