"""Answers to the exercise lr_schedule, written from its text alone."""

import math


def allowed(steps, warmup):
    if not warmup < steps:
        raise ValueError("too long a warm-up")


def half_cosine(p):
    return math.cos(math.pi * p / 2) ** 2


def right_square(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    if step < warmup:
        return step / warmup * lr
    if step >= steps:
        return float(min_lr)
    share = half_cosine((step - warmup) / (steps - warmup))
    return share * lr + (1 - share) * min_lr


def right_sine(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    if warmup and step <= warmup:
        return lr * (step / warmup)
    middle, height = (lr + min_lr) / 2, (lr - min_lr) / 2
    left = max(steps - step, 0) / (steps - warmup)
    return middle + height * math.sin(math.pi * (left - 0.5))


def from_zero(step, steps, lr, min_lr=0.0, warmup=0):
    return right_square(step - 1, steps, lr, min_lr, warmup)


def warmup_from_step_zero(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    if step <= warmup:
        return lr * (step - 1) / warmup
    return right_square(step, steps, lr, min_lr, warmup)


def rise_from_min_lr(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    if step <= warmup:
        return min_lr + (lr - min_lr) * step / warmup
    return right_square(step, steps, lr, min_lr, warmup)


def rise_plus_min_lr(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    if step < warmup:
        return max(min_lr, lr * step / warmup)
    return right_square(step, steps, lr, min_lr, warmup)


def rise_one_step_longer(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    if step <= warmup:
        return lr * step / (warmup + 1)
    return right_square(step, steps, lr, min_lr, warmup)


def cosine_over_whole_run(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    if step <= warmup:
        return lr * step / warmup
    return min_lr + half_cosine(min(step / steps, 1)) * (lr - min_lr)


def cosine_longer_by_warmup(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    if step <= warmup:
        return lr * step / warmup
    return min_lr + half_cosine(min((step - warmup) / steps, 1)) * (lr - min_lr)


def ends_one_step_early(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    if step <= warmup:
        return lr * step / warmup
    p = (step - warmup) / max(steps - warmup - 1, 1)
    return min_lr + half_cosine(min(p, 1)) * (lr - min_lr)


def counted_from_first_cosine_step(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    if step <= warmup:
        return lr * step / warmup
    p = (step - warmup - 1) / max(steps - warmup - 1, 1)
    return min_lr + half_cosine(min(p, 1)) * (lr - min_lr)


def rises_again(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    if step <= warmup:
        return lr * step / warmup
    return min_lr + half_cosine((step - warmup) / (steps - warmup)) * (lr - min_lr)


def zero_after_the_end(step, steps, lr, min_lr=0.0, warmup=0):
    return 0.0 if step > steps else right_square(step, steps, lr, min_lr, warmup)


def whole_cosine(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    if step <= warmup:
        return lr * step / warmup
    p = min((step - warmup) / (steps - warmup), 1)
    return min_lr + half_cosine(2 * p) * (lr - min_lr)


def quarter_cosine(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    if step <= warmup:
        return lr * step / warmup
    p = min((step - warmup) / (steps - warmup), 1)
    return min_lr + math.cos(math.pi / 2 * p) * (lr - min_lr)


def not_halved(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    if step <= warmup:
        return lr * step / warmup
    p = min((step - warmup) / (steps - warmup), 1)
    return min_lr + (1 + math.cos(math.pi * p)) * (lr - min_lr)


def min_lr_on_top(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    if step <= warmup:
        return lr * step / warmup
    return min_lr + lr * half_cosine(min((step - warmup) / (steps - warmup), 1))


def min_lr_as_a_floor(step, steps, lr, min_lr=0.0, warmup=0):
    if step <= warmup:
        return right_square(step, steps, lr, min_lr, warmup)
    return max(min_lr, right_square(step, steps, lr, 0.0, warmup))


def min_lr_ignored(step, steps, lr, min_lr=0.0, warmup=0):
    return right_square(step, steps, lr, 0.0, warmup)


def falls_on_a_line(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    if step <= warmup:
        return lr * step / warmup
    p = min((step - warmup) / (steps - warmup), 1)
    return lr + p * (min_lr - lr)


def equal_warmup_allowed(step, steps, lr, min_lr=0.0, warmup=0):
    if warmup > steps:
        raise ValueError("too long")
    return lr * step / warmup if step <= warmup else right_square(step, steps, lr, min_lr, warmup)


def refused_only_in_the_cosine(step, steps, lr, min_lr=0.0, warmup=0):
    if step < warmup:
        return lr * step / warmup
    return right_square(step, steps, lr, min_lr, warmup)


def warmup_shortened(step, steps, lr, min_lr=0.0, warmup=0):
    return right_square(step, steps, lr, min_lr, min(warmup, steps - 1))


def assertion(step, steps, lr, min_lr=0.0, warmup=0):
    assert warmup < steps
    return right_square(step, steps, lr, min_lr, warmup)


def one_step_of_warmup_at_least(step, steps, lr, min_lr=0.0, warmup=0):
    return right_square(step, steps, lr, min_lr, max(warmup, 1))


def division_by_no_warmup(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    rise = lr * step / warmup
    return rise if step <= warmup else right_square(step, steps, lr, min_lr, warmup)


class Counter:
    last = 0


def counts_its_calls(step, steps, lr, min_lr=0.0, warmup=0):
    Counter.last += 1
    return right_square(Counter.last, steps, lr, min_lr, warmup)


def degrees(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    if step <= warmup:
        return lr * step / warmup
    p = min((step - warmup) / (steps - warmup), 1)
    return min_lr + 0.5 * (1 + math.cos(180 * p)) * (lr - min_lr)


def whole_division(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    if step <= warmup:
        return lr * (step // warmup)
    return right_square(step, steps, lr, min_lr, warmup)


def gives_a_tensor(step, steps, lr, min_lr=0.0, warmup=0):
    import torch

    return torch.tensor(right_square(step, steps, lr, min_lr, warmup), dtype=torch.float64)


def factor_for_lambda_lr(step, steps, lr, min_lr=0.0, warmup=0):
    return right_square(step, steps, lr, min_lr, warmup) / lr


def product_of_both(step, steps, lr, min_lr=0.0, warmup=0):
    allowed(steps, warmup)
    rise = min(1.0, step / warmup) if warmup else 1.0
    return rise * (min_lr + half_cosine(min(step / steps, 1)) * (lr - min_lr))


ANSWERS = {
    from_zero: "the steps count from 0, in the warm-up and in the cosine",
    warmup_from_step_zero: "the warm-up counts from 0, so that step 1 does nothing",
    rise_from_min_lr: "the warm-up rises from min_lr, not from 0",
    rise_plus_min_lr: "min_lr is the lowest rate of the warm-up, too",
    rise_one_step_longer: "the warm-up reaches lr one step too late",
    cosine_over_whole_run: "the cosine begins with step 1, under the warm-up",
    cosine_longer_by_warmup: "the cosine begins after the warm-up, but is as long as the whole run",
    ends_one_step_early: "the cosine ends one step early",
    counted_from_first_cosine_step: "the first step after the warm-up still has the rate lr",
    rises_again: "the rate rises again after the last step",
    zero_after_the_end: "after the last step the rate is 0, not min_lr",
    whole_cosine: "a whole period of the cosine: down, and up again",
    quarter_cosine: "a quarter of the cosine, from 1 to 0",
    not_halved: "1 + cosine is not halved",
    min_lr_on_top: "min_lr is added on top of lr",
    min_lr_as_a_floor: "min_lr cuts the curve off, but does not lift it",
    min_lr_ignored: "min_lr is not used",
    falls_on_a_line: "a straight line in the place of the cosine",
    equal_warmup_allowed: "a warm-up as long as the run is accepted",
    refused_only_in_the_cosine: "",
    warmup_shortened: "",
    assertion: "",
    one_step_of_warmup_at_least: "without warm-up, step 1 is a warm-up all the same",
    division_by_no_warmup: "without warm-up a division by 0",
    counts_its_calls: "",
    degrees: "the angle in degrees",
    whole_division: "",
    gives_a_tensor: "",
    factor_for_lambda_lr: "",
    product_of_both: "the cosine begins with step 1, under the warm-up",
}
RIGHT = [right_square, right_sine]
SILENT = [division_by_no_warmup]
