"""Answers to rotate_moments that were written from its text alone."""

import torch

ONE = (1.0, 1.0)


def between(old, new):
    left = None if old[0] is None else new[0].T @ old[0]
    right = None if old[1] is None else old[1].T @ new[1]
    return left, right


def turn(x, left, right):
    x = x if left is None else left @ x
    return x if right is None else x @ right


def square(x):
    return None if x is None else x**2


def right_with_both_sides(exp_avg, exp_avg_sq, old, new, corrections=ONE):
    left, right = between(old, new)
    c1, c2 = corrections
    m, v = exp_avg / c1, exp_avg_sq / c2
    mean = turn(m, left, right)
    variance = turn((v - m**2).clamp(min=0), square(left), square(right))
    return mean * c1, (variance + mean**2) * c2


def right_with_einsum(exp_avg, exp_avg_sq, old, new, corrections=ONE):
    m, v = exp_avg / corrections[0], exp_avg_sq / corrections[1]
    eye = {"dtype": m.dtype, "device": m.device}
    a = torch.eye(m.shape[0], **eye) if old[0] is None else new[0].mT @ old[0]
    b = torch.eye(m.shape[1], **eye) if old[1] is None else new[1].mT @ old[1]
    mean = torch.einsum("ij,jk,lk->il", a, m, b)
    spread = torch.einsum("ij,jk,lk->il", a * a, torch.relu(v - m * m), b * b)
    v = spread + mean.square()
    return mean * corrections[0], v * corrections[1]


def second_moment_turned_like_the_first(exp_avg, exp_avg_sq, old, new, corrections=ONE):
    left, right = between(old, new)
    return turn(exp_avg, left, right), turn(exp_avg_sq, left, right)


def squares_only_without_means(exp_avg, exp_avg_sq, old, new, corrections=ONE):
    left, right = between(old, new)
    return turn(exp_avg, left, right), turn(exp_avg_sq, square(left), square(right))


def transposed_turn(exp_avg, exp_avg_sq, old, new, corrections=ONE):
    left, right = between(new, old)
    c1, c2 = corrections
    m, v = exp_avg / c1, exp_avg_sq / c2
    mean = turn(m, left, right)
    variance = turn((v - m**2).clamp(min=0), square(left), square(right))
    return mean * c1, (variance + mean**2) * c2


def corrections_unused(exp_avg, exp_avg_sq, old, new, corrections=ONE):
    left, right = between(old, new)
    mean = turn(exp_avg, left, right)
    variance = turn((exp_avg_sq - exp_avg**2).clamp(min=0), square(left), square(right))
    return mean, variance + mean**2


def corrected_moments_given_back(exp_avg, exp_avg_sq, old, new, corrections=ONE):
    left, right = between(old, new)
    m, v = exp_avg / corrections[0], exp_avg_sq / corrections[1]
    mean = turn(m, left, right)
    variance = turn((v - m**2).clamp(min=0), square(left), square(right))
    return mean, variance + mean**2


def one_correction_for_both(exp_avg, exp_avg_sq, old, new, corrections=ONE):
    left, right = between(old, new)
    c = corrections[0]
    m, v = exp_avg / c, exp_avg_sq / c
    mean = turn(m, left, right)
    variance = turn((v - m**2).clamp(min=0), square(left), square(right))
    return mean * c, (variance + mean**2) * c


def multiplied_where_divided(exp_avg, exp_avg_sq, old, new, corrections=ONE):
    left, right = between(old, new)
    m, v = exp_avg * corrections[0], exp_avg_sq * corrections[1]
    mean = turn(m, left, right)
    variance = turn((v - m**2).clamp(min=0), square(left), square(right))
    return mean / corrections[0], (variance + mean**2) / corrections[1]


def negative_variance_kept(exp_avg, exp_avg_sq, old, new, corrections=ONE):
    left, right = between(old, new)
    m, v = exp_avg / corrections[0], exp_avg_sq / corrections[1]
    mean = turn(m, left, right)
    v = turn(v - m**2, square(left), square(right)) + mean**2
    return mean * corrections[0], v * corrections[1]


def clamped_at_the_end(exp_avg, exp_avg_sq, old, new, corrections=ONE):
    left, right = between(old, new)
    m, v = exp_avg / corrections[0], exp_avg_sq / corrections[1]
    mean = turn(m, left, right)
    v = (turn(v - m**2, square(left), square(right)) + mean**2).clamp(min=0)
    return mean * corrections[0], v * corrections[1]


def clamped_after_the_turn(exp_avg, exp_avg_sq, old, new, corrections=ONE):
    left, right = between(old, new)
    m, v = exp_avg / corrections[0], exp_avg_sq / corrections[1]
    mean = turn(m, left, right)
    spread = turn(v - m**2, square(left), square(right)).clamp(min=0)
    return mean * corrections[0], (spread + mean**2) * corrections[1]


def absolute_variance(exp_avg, exp_avg_sq, old, new, corrections=ONE):
    left, right = between(old, new)
    m, v = exp_avg / corrections[0], exp_avg_sq / corrections[1]
    mean = turn(m, left, right)
    v = turn((v - m**2).abs(), square(left), square(right)) + mean**2
    return mean * corrections[0], v * corrections[1]


def right_basis_forgotten_with_a_left_one(exp_avg, exp_avg_sq, old, new, corrections=ONE):
    left, right = between(old, new)
    if left is not None:
        right = None
    m, v = exp_avg / corrections[0], exp_avg_sq / corrections[1]
    mean = turn(m, left, right)
    variance = turn((v - m**2).clamp(min=0), square(left), square(right))
    return mean * corrections[0], (variance + mean**2) * corrections[1]


def old_mean_added_back(exp_avg, exp_avg_sq, old, new, corrections=ONE):
    left, right = between(old, new)
    m, v = exp_avg / corrections[0], exp_avg_sq / corrections[1]
    variance = turn((v - m**2).clamp(min=0), square(left), square(right))
    spread = turn(m**2, square(left), square(right))
    return turn(m, left, right) * corrections[0], (variance + spread) * corrections[1]


def product_of_bases_squared_first(exp_avg, exp_avg_sq, old, new, corrections=ONE):
    left, right = between(old, new)
    left2 = None if old[0] is None else (new[0] ** 2).T @ old[0] ** 2
    right2 = None if old[1] is None else (old[1] ** 2).T @ new[1] ** 2
    m, v = exp_avg / corrections[0], exp_avg_sq / corrections[1]
    mean = turn(m, left, right)
    variance = turn((v - m**2).clamp(min=0), left2, right2)
    return mean * corrections[0], (variance + mean**2) * corrections[1]


def moments_divided_in_place(exp_avg, exp_avg_sq, old, new, corrections=ONE):
    left, right = between(old, new)
    exp_avg /= corrections[0]
    exp_avg_sq /= corrections[1]
    mean = turn(exp_avg, left, right)
    variance = turn((exp_avg_sq - exp_avg**2).clamp(min=0), square(left), square(right))
    return mean * corrections[0], (variance + mean**2) * corrections[1]


def in_float32(exp_avg, exp_avg_sq, old, new, corrections=ONE):
    dtype = exp_avg.dtype
    old, new = ([None if b is None else b.float() for b in pair] for pair in (old, new))
    m, v = right_with_both_sides(exp_avg.float(), exp_avg_sq.float(), old, new, corrections)
    return m.to(dtype), v.to(dtype)


ANSWERS = {
    second_moment_turned_like_the_first: (
        "the second moment is turned like the first, mean and all"
    ),
    squares_only_without_means: "the second moment as a whole by the squares, its mean not apart",
    transposed_turn: "the turn in the other direction, from new to old",
    corrections_unused: "the corrections are not used",
    corrected_moments_given_back: "the corrected moments are returned",
    one_correction_for_both: "",
    multiplied_where_divided: "",
    negative_variance_kept: "a variance below 0 is taken as it is",
    clamped_at_the_end: "",
    clamped_after_the_turn: "0 is put in after the turn, not before",
    absolute_variance: "the size of a variance below 0 is used",
    right_basis_forgotten_with_a_left_one: "with two bases only the left one is turned",
    old_mean_added_back: "the second moment as a whole by the squares, its mean not apart",
    product_of_bases_squared_first: "",
    moments_divided_in_place: "",
    in_float32: "",
}
RIGHT = [right_with_both_sides, right_with_einsum]
