"""Answers to the exercise swiglu, written from its text alone."""

import torch
import torch.nn.functional as F


def right_torch(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def right_textbook_division(x, gate, up, down):
    z = torch.einsum("...c,ic->...i", x, gate)
    kept = torch.sigmoid(z).mul(z).mul(torch.einsum("...c,ic->...i", x, up))
    return torch.einsum("...i,ci->...c", kept, down)


def silu_on_up(x, gate, up, down):
    return (F.linear(x, gate) * F.silu(F.linear(x, up))) @ down.mT


def gelu(x, gate, up, down):
    return (F.gelu(x @ gate.mT) * (x @ up.mT)) @ down.mT


def sigmoid_only(x, gate, up, down):
    return ((x @ gate.mT).sigmoid() * (x @ up.mT)) @ down.mT


def relu(x, gate, up, down):
    return ((x @ gate.mT).clamp(min=0) * (x @ up.mT)) @ down.mT


def no_activation(x, gate, up, down):
    return ((x @ gate.mT) * (x @ up.mT)) @ down.mT


def silu_after_product(x, gate, up, down):
    return F.silu((x @ gate.mT) * (x @ up.mT)) @ down.mT


def silu_on_both(x, gate, up, down):
    return (F.silu(x @ gate.mT) * F.silu(x @ up.mT)) @ down.mT


def added(x, gate, up, down):
    return (F.silu(x @ gate.mT) + x @ up.mT) @ down.mT


def up_forgotten(x, gate, up, down):
    return F.silu(x @ gate.mT) @ down.mT


def residual_added(x, gate, up, down):
    return x + right_torch(x, gate, up, down)


def transposed_if_it_fits(x, gate, up, down):
    if gate.shape[0] == gate.shape[1]:
        return (F.silu(x @ gate) * (x @ up)) @ down
    return right_torch(x, gate, up, down)


def not_transposed(x, gate, up, down):
    return (F.silu(x @ gate) * (x @ up)) @ down


def only_down_not_transposed(x, gate, up, down):
    h = F.silu(x @ gate.mT) * (x @ up.mT)
    return h @ down if down.shape[0] == down.shape[1] else h @ down.mT


def exp_over_one_plus_exp(x, gate, up, down):
    z = x @ gate.mT
    return (z * z.exp() / (1 + z.exp()) * (x @ up.mT)) @ down.mT


def limited_before_exp(x, gate, up, down):
    z = (x @ gate.mT).clamp(-80, 80)
    return (z / (1 + torch.exp(-z)) * (x @ up.mT)) @ down.mT


def nan_to_zero(x, gate, up, down):
    z = x @ gate.mT
    return ((z * z.exp() / (1 + z.exp())).nan_to_num() * (x @ up.mT)) @ down.mT


def quick_gelu(x, gate, up, down):
    z = x @ gate.mT
    return (z * torch.sigmoid(1.702 * z) * (x @ up.mT)) @ down.mT


def hard_swish(x, gate, up, down):
    return (F.hardswish(x @ gate.mT) * (x @ up.mT)) @ down.mT


def softmax_gate(x, gate, up, down):
    return ((x @ gate.mT).softmax(-1) * (x @ up.mT)) @ down.mT


def always_float(x, gate, up, down):
    return right_torch(x.float(), gate.float(), up.float(), down.float()).to(x.dtype)


def stays_float(x, gate, up, down):
    return right_torch(*(t if t.itemsize == 8 else t.float() for t in (x, gate, up, down)))


def tokens_by_view(x, gate, up, down):
    return right_torch(x.view(-1, x.size(-1)), gate, up, down).view(x.shape)


def three_axes(x, gate, up, down):
    h = F.silu(torch.einsum("btc,ic->bti", x, gate)) * torch.einsum("btc,ic->bti", x, up)
    return torch.einsum("bti,ci->btc", h, down)


def gate_detached(x, gate, up, down):
    passed = torch.sigmoid((x @ gate.mT).detach()) * (x @ gate.mT)
    return (passed * (x @ up.mT)) @ down.mT


def layers_from_data(x, gate, up, down):
    maps = [torch.nn.Linear(w.shape[1], w.shape[0], bias=False) for w in (gate, up, down)]
    for layer, w in zip(maps, (gate, up, down)):
        layer.weight.data = w.data
    g, u, d = maps
    return d(F.silu(g(x)) * u(x))


ANSWERS = {
    silu_on_up: "gate and up are swapped: silu is applied to up",
    gelu: "GELU in the place of silu",
    sigmoid_only: "the sigmoid of the gate alone, without the gate: GLU, not SwiGLU",
    relu: "ReLU in the place of silu",
    no_activation: "no silu: the gate itself is multiplied",
    silu_after_product: "silu after the product, not before",
    silu_on_both: "up goes through silu too",
    added: "gate and up are added, not multiplied",
    up_forgotten: "up is left out",
    residual_added: "x itself is added: the sum belongs to the block, not to the MLP",
    transposed_if_it_fits: "weights are transposed until the shapes fit",
    not_transposed: "no weight is transposed, as if the inputs came first",
    only_down_not_transposed: "down is not transposed",
    exp_over_one_plus_exp: "z * exp(z) / (1 + exp(z)), where a large exponential is infinite",
    limited_before_exp: "",
    nan_to_zero: "",
    quick_gelu: "1.702 in the sigmoid, which is a form of GELU",
    hard_swish: "",
    softmax_gate: "softmax in the place of silu",
    always_float: "float64 is computed in float32",
    stays_float: "the result is float32",
    tokens_by_view: "a view of a tensor that is not contiguous",
    three_axes: "only for three axes",
    gate_detached: "the sigmoid is detached",
    layers_from_data: "",
}
RIGHT = [right_torch, right_textbook_division]
SILENT = [exp_over_one_plus_exp, always_float, tokens_by_view, three_axes]
