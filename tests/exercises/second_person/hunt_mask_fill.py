"""Answers to hunt_mask_fill, written from its text by a second person."""

import math

import torch


def scores_of(q, k):
    return torch.einsum("bhtd,bhsd->bhts", q, k) / q.shape[-1] ** 0.5


def where_anything_is_seen(q, k, v, visible):
    """Right: a blind row gets finite scores before the softmax, and zero weights after it."""
    sees = visible.any(-1, keepdim=True)
    s = torch.where(visible, q.float() @ k.float().mT / math.sqrt(q.size(-1)), -math.inf)
    p = torch.where(sees, s, 0.0).softmax(-1) * sees
    return (p @ v.float()).to(q.dtype)


def added_minus_a_billion(q, k, v, visible):
    s = scores_of(q.float(), k.float()) + (~visible) * -1e9
    return (s.softmax(-1) @ v.float()).to(q.dtype)


def added_smallest_number(q, k, v, visible):
    s = scores_of(q, k)
    s = s + (~visible).to(s.dtype) * torch.finfo(s.dtype).min
    return s.softmax(-1) @ v


def filled_with_smallest_number(q, k, v, visible):
    s = scores_of(q, k)
    return s.masked_fill(~visible, torch.finfo(s.dtype).min).softmax(-1) @ v


def filled_with_infinity(q, k, v, visible):
    s = scores_of(q, k)
    return s.masked_fill(~visible, -torch.inf).softmax(-1) @ v


def nan_made_zero(q, k, v, visible):
    p = scores_of(q, k).masked_fill(visible.logical_not(), float("-inf")).softmax(dim=-1)
    return p.nan_to_num() @ v


def blind_rows_zeroed_at_the_end(q, k, v, visible):
    s = torch.where(visible, scores_of(q, k), torch.tensor(-torch.inf, dtype=q.dtype))
    out = s.softmax(-1) @ v
    return torch.where(visible.any(-1)[..., None], out, torch.zeros_like(out))


def filled_with_ten_thousand(q, k, v, visible):
    s = torch.where(visible, scores_of(q, k), -1e4)
    p = s.softmax(-1) * visible
    return p.to(v.dtype) @ v


def hidden_weights_deleted(q, k, v, visible):
    p = scores_of(q, k).softmax(-1) * visible
    return p @ v


def weights_divided_anew(q, k, v, visible):
    p = scores_of(q.float(), k.float()).softmax(-1) * visible
    return (p / p.sum(-1, keepdim=True).clamp(min=1e-9) @ v.float()).to(q.dtype)


def scores_times_mask(q, k, v, visible):
    s = scores_of(q, k) * visible
    return s.softmax(-1) @ v


def mask_upside_down(q, k, v, visible):
    return where_anything_is_seen(q, k, v, ~visible)


def lowest_of_the_dtype_of_q(q, k, v, visible):
    s = scores_of(q.float(), k.float()).masked_fill(~visible, torch.finfo(q.dtype).min)
    return (s.softmax(-1) * visible @ v.float()).to(q.dtype)


def float32_returned(q, k, v, visible):
    return where_anything_is_seen(q.float(), k.float(), v.float(), visible)


def scale_forgotten(q, k, v, visible):
    return where_anything_is_seen(q * q.shape[-1] ** 0.5, k, v, visible)


def blind_rows_read_the_mean(q, k, v, visible):
    sees = visible.any(-1, keepdim=True)
    return where_anything_is_seen(q, k, v, visible | ~sees)


def exponentials_without_maximum(q, k, v, visible):
    e = scores_of(q.float(), k.float()).exp() * visible
    return (e / (e.sum(-1, keepdim=True) + 1e-9) @ v.float()).to(q.dtype)


def hidden_keys_erased(q, k, v, visible):
    seen = visible.any(2)[..., None]  # by any query: no mask for one of them
    return where_anything_is_seen(q, k * seen, v * seen, visible.any(2, True).expand_as(visible))


def as_many_keys_as_queries(q, k, v, visible):
    T = q.shape[2]
    p = torch.zeros(*q.shape[:2], T, T, dtype=q.dtype)
    p[:] = where_anything_is_seen(q, k, torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1), visible)
    return p @ v


ANSWERS = {
    added_minus_a_billion: "a very low number is added, not written",
    added_smallest_number: "a very low number is added, not written",
    filled_with_smallest_number: (
        "the lowest number is written, but rows without a key are a mean of hidden values"
    ),
    filled_with_infinity: "minus infinity is written, so that rows without a key are NaN",
    blind_rows_zeroed_at_the_end: "",
    filled_with_ten_thousand: (
        "-10000 is written, and what is hidden gets no weight, so that no key has any"
    ),
    hidden_weights_deleted: "weights are set to 0 after the softmax, so that rows do not sum to 1",
    weights_divided_anew: (
        "weights are set to 0, then divided by their sum: the largest may have been hidden"
    ),
    scores_times_mask: "hidden scores are 0, which is a score like any other",
    mask_upside_down: "hidden keys are seen, and visible ones are not",
    float32_returned: "the result stays float32",
    scale_forgotten: "the root of D is lost in the repair",
    blind_rows_read_the_mean: "a row without a key sees all of them",
    exponentials_without_maximum: "exponentials without a maximum",
    hidden_keys_erased: "",
    as_many_keys_as_queries: "as many keys as queries",
}
RIGHT = [where_anything_is_seen, nan_made_zero, lowest_of_the_dtype_of_q]
SILENT = [float32_returned, as_many_keys_as_queries]
