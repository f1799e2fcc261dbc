"""Answers to rms_norm, written from its text by a second person."""

import torch


def half(x):
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def by_vector_norm(x, weight, eps=1e-6):
    wide = half(x)
    length = (torch.linalg.vector_norm(wide, dim=-1) ** 2 / x.size(-1) + eps) ** 0.5
    return torch.div(wide, length[..., None]).type_as(x) * weight


def layer_norm(x, weight, eps=1e-6):
    mu = x.mean(-1, keepdim=True)
    var = x.var(-1, keepdim=True, unbiased=False)
    return weight * (x - mu) / torch.sqrt(var + eps)


def divided_by_standard_deviation(x, weight, eps=1e-6):
    wide = half(x)
    return (wide / (wide.var(dim=-1, keepdim=True) + eps).sqrt()).to(x.dtype) * weight


def divided_by_euclidean_norm(x, weight, eps=1e-6):
    wide = half(x)
    return (wide / (wide.norm(dim=-1, keepdim=True) + eps)).to(x.dtype) * weight


def eps_after_the_root(x, weight, eps=1e-6):
    wide = half(x)
    rms = wide.square().mean(-1, keepdim=True).sqrt() + eps
    return (wide / rms).to(x.dtype) * weight


def other_default_eps(x, weight, eps=1e-5):
    return by_vector_norm(x, weight, eps)


def weight_inside_float32(x, weight, eps=1e-6):
    wide = half(x)
    out = wide / torch.sqrt(torch.mean(wide * wide, -1, True) + eps)
    return (half(weight) * out).to(x.dtype)


def squared_in_half(x, weight, eps=1e-6):
    ms = (x**2).float().mean(-1, keepdim=True).to(x.dtype) if x.dtype != torch.float64 else (
        (x**2).mean(-1, keepdim=True))  # fmt: skip
    return x / (ms + eps).sqrt() * weight


def float32_for_everything(x, weight, eps=1e-6):
    wide = x.float()
    rms = (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return (wide / rms).to(x.dtype) * weight


def cast_forgotten_at_the_end(x, weight, eps=1e-6):
    wide = half(x)
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * half(weight)


def second_axis(x, weight, eps=1e-6):
    wide = half(x)
    return (wide * torch.rsqrt((wide * wide).mean(1, keepdim=True) + eps)).to(x.dtype) * weight


def over_all_axes(x, weight, eps=1e-6):
    wide = half(x)
    return (wide * torch.rsqrt(wide.square().mean() + eps)).to(x.dtype) * weight


def multiplied_by_the_root(x, weight, eps=1e-6):
    wide = half(x)
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype) * weight


def weight_first(x, weight, eps=1e-6):
    return by_vector_norm(x * weight, torch.ones_like(weight), eps)


def writes_into_x(x, weight, eps=1e-6):
    with torch.no_grad():
        scale = torch.rsqrt(half(x).square().mean(-1, keepdim=True) + eps)
        x *= scale.to(x.dtype)
    return x * weight


def scale_without_gradient(x, weight, eps=1e-6):
    wide = half(x)
    with torch.no_grad():
        scale = 1 / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return (wide * scale).to(x.dtype) * weight


def flattened_by_view(x, weight, eps=1e-6):
    rows = x.view(-1, x.size(-1))
    return by_vector_norm(rows, weight, eps).view(x.shape)


ANSWERS = {
    layer_norm: "the mean is subtracted, as in LayerNorm",
    divided_by_standard_deviation: "the standard deviation, which has the mean subtracted",
    divided_by_euclidean_norm: "the sum of the squares in the place of their mean",
    eps_after_the_root: "eps outside the root",
    other_default_eps: "another eps than 1e-6 by default",
    weight_inside_float32: "rounded after the weight, not before",
    squared_in_half: "no float32 for the square",
    float32_for_everything: "float64 is computed in float32",
    cast_forgotten_at_the_end: "the result stays float32",
    second_axis: "the mean over the tokens, not over the features",
    over_all_axes: "the mean over the whole tensor",
    multiplied_by_the_root: "sqrt for rsqrt: a product in the place of a quotient",
    weight_first: "the weight is in x before the norm",
    writes_into_x: "written into x itself",
    scale_without_gradient: "the root is detached",
    flattened_by_view: "a view of a tensor that is not contiguous",
}
RIGHT = [by_vector_norm]
SILENT = [float32_for_everything, flattened_by_view]
