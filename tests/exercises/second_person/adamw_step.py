"""Answers to adamw_step that were written from its text alone."""

import torch

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 1e-2


def right_by_plain_formulas(
    param, grad, exp_avg, exp_avg_sq, step, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
):
    b1, b2 = betas
    m = b1 * exp_avg + (1 - b1) * grad
    v = b2 * exp_avg_sq + (1 - b2) * grad**2
    m_hat, v_hat = m / (1 - b1**step), v / (1 - b2**step)
    return (1 - lr * weight_decay) * param - lr * m_hat / (v_hat.sqrt() + eps), m, v


def right_with_one_step_size(
    param, grad, exp_avg, exp_avg_sq, step, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
):
    m = exp_avg + (grad - exp_avg) * (1 - betas[0])
    v = exp_avg_sq + (grad * grad - exp_avg_sq) * (1 - betas[1])
    size = lr / (1 - betas[0] ** step)
    below = v.sqrt() / (1 - betas[1] ** step) ** 0.5 + eps
    return param - lr * weight_decay * param - size * m / below, m, v


def l2_into_the_gradient(
    param, grad, exp_avg, exp_avg_sq, step, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
):
    grad = grad + weight_decay * param
    m = betas[0] * exp_avg + (1 - betas[0]) * grad
    v = betas[1] * exp_avg_sq + (1 - betas[1]) * grad**2
    update = (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
    return param - lr * update, m, v


def uncorrected_moments(
    param, grad, exp_avg, exp_avg_sq, step, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
):
    m = betas[0] * exp_avg + (1 - betas[0]) * grad
    v = betas[1] * exp_avg_sq + (1 - betas[1]) * grad**2
    return param * (1 - lr * weight_decay) - lr * m / (v.sqrt() + eps), m, v


def steps_counted_from_zero(
    param, grad, exp_avg, exp_avg_sq, step, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
):
    t = step + 1
    m = betas[0] * exp_avg + (1 - betas[0]) * grad
    v = betas[1] * exp_avg_sq + (1 - betas[1]) * grad**2
    update = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return param * (1 - lr * weight_decay) - lr * update, m, v


def eps_within_the_root(
    param, grad, exp_avg, exp_avg_sq, step, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
):
    m = betas[0] * exp_avg + (1 - betas[0]) * grad
    v = betas[1] * exp_avg_sq + (1 - betas[1]) * grad**2
    update = (m / (1 - betas[0] ** step)) * torch.rsqrt(v / (1 - betas[1] ** step) + eps)
    return param * (1 - lr * weight_decay) - lr * update, m, v


def eps_before_the_correction(
    param, grad, exp_avg, exp_avg_sq, step, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
):
    m = betas[0] * exp_avg + (1 - betas[0]) * grad
    v = betas[1] * exp_avg_sq + (1 - betas[1]) * grad**2
    scale = lr * (1 - betas[1] ** step) ** 0.5 / (1 - betas[0] ** step)
    return param * (1 - lr * weight_decay) - scale * m / (v.sqrt() + eps), m, v


def corrected_moments_returned(
    param, grad, exp_avg, exp_avg_sq, step, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
):
    m = (betas[0] * exp_avg + (1 - betas[0]) * grad) / (1 - betas[0] ** step)
    v = (betas[1] * exp_avg_sq + (1 - betas[1]) * grad**2) / (1 - betas[1] ** step)
    return param * (1 - lr * weight_decay) - lr * m / (v.sqrt() + eps), m, v


def decay_not_times_lr(
    param, grad, exp_avg, exp_avg_sq, step, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
):
    m = betas[0] * exp_avg + (1 - betas[0]) * grad
    v = betas[1] * exp_avg_sq + (1 - betas[1]) * grad**2
    update = (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
    return param - weight_decay * param - lr * update, m, v


def decay_of_the_moved_weight(
    param, grad, exp_avg, exp_avg_sq, step, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
):
    m = betas[0] * exp_avg + (1 - betas[0]) * grad
    v = betas[1] * exp_avg_sq + (1 - betas[1]) * grad**2
    param = param - lr * (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
    return param - lr * weight_decay * param, m, v


def written_over_the_old_moments(
    param, grad, exp_avg, exp_avg_sq, step, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
):
    exp_avg.mul_(betas[0]).add_(grad, alpha=1 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    update = (exp_avg / (1 - betas[0] ** step)) / (
        (exp_avg_sq / (1 - betas[1] ** step)).sqrt() + eps
    )
    return param * (1 - lr * weight_decay) - lr * update, exp_avg, exp_avg_sq


def betas_swapped_in_the_square(
    param, grad, exp_avg, exp_avg_sq, step, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
):
    m = betas[0] * exp_avg + (1 - betas[0]) * grad
    v = (1 - betas[1]) * exp_avg_sq + betas[1] * grad**2
    update = (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
    return param * (1 - lr * weight_decay) - lr * update, m, v


def square_of_the_mean(
    param, grad, exp_avg, exp_avg_sq, step, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
):
    m = betas[0] * exp_avg + (1 - betas[0]) * grad
    v = betas[1] * exp_avg_sq + (1 - betas[1]) * m**2
    update = (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
    return param * (1 - lr * weight_decay) - lr * update, m, v


def always_in_float32(
    param, grad, exp_avg, exp_avg_sq, step, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY
):
    dtype = param.dtype
    param, grad, exp_avg, exp_avg_sq = (x.float() for x in (param, grad, exp_avg, exp_avg_sq))
    m = betas[0] * exp_avg + (1 - betas[0]) * grad
    v = betas[1] * exp_avg_sq + (1 - betas[1]) * grad**2
    update = (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
    return (param * (1 - lr * weight_decay) - lr * update).to(dtype), m.to(dtype), v.to(dtype)


def weight_decay_zero_like_adam(
    param, grad, exp_avg, exp_avg_sq, step, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0
):
    m = betas[0] * exp_avg + (1 - betas[0]) * grad
    v = betas[1] * exp_avg_sq + (1 - betas[1]) * grad**2
    update = (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
    return param * (1 - lr * weight_decay) - lr * update, m, v


ANSWERS = {
    l2_into_the_gradient: "the decay as an L2 penalty, part of the gradient",
    uncorrected_moments: "no bias correction",
    steps_counted_from_zero: "the correction counts one step too many",
    eps_within_the_root: "eps inside the root",
    eps_before_the_correction: (
        "eps is added before the bias correction, so that it acts 31.6 times in step 1"
    ),
    corrected_moments_returned: "the corrected means are handed to the next step",
    decay_not_times_lr: "the decay without the learning rate",
    decay_of_the_moved_weight: "the decay after the step, so that the step decays too",
    written_over_the_old_moments: "the means are changed in place",
    betas_swapped_in_the_square: "",
    square_of_the_mean: "the square of the mean, not the mean of the squares",
    always_in_float32: "float64 is computed in float32",
    weight_decay_zero_like_adam: "no decay by default",
}
RIGHT = [right_by_plain_formulas, right_with_one_step_size]
