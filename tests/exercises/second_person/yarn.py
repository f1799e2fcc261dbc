"""Answers to the exercise yarn, written from its text alone."""

import math

import torch


def parts(head_dim, theta, length, fast, slow):
    freqs = torch.tensor([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]).double()
    low, high = (
        head_dim * math.log(length / (2 * math.pi * r)) / (2 * math.log(theta))
        for r in (fast, slow)
    )
    return freqs, low, high


def ramp(low, high, n):
    if low == high:
        high += 0.001
    return ((torch.arange(n) - low) / (high - low)).clamp(0, 1)


def mix(freqs, gamma, s):
    return (freqs * (1 - gamma + gamma / s)).float()


def scale(s):
    return 0.1 * math.log(s) + 1.0


def right_loop(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    freqs, low, high = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    low, high = max(math.floor(low), 0), math.ceil(high)
    new = []
    for i, w in enumerate(freqs.tolist()):
        if low == high:
            share = float(i > low)
        else:
            share = min(max((i - low) / (high - low), 0.0), 1.0)
        new.append((1 - share) * w + share * w / factor)
    return torch.tensor(new), scale(factor)


def right_small_step(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    freqs, low, high = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    gamma = ramp(max(math.floor(low), 0), math.ceil(high), len(freqs))
    return mix(freqs, gamma, factor), scale(factor)


def slow_ones_kept(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    freqs, low, high = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    gamma = 1 - ramp(max(math.floor(low), 0), math.ceil(high), len(freqs))
    return mix(freqs, gamma, factor), scale(factor)


def all_slowed(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    freqs, *_ = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    return (freqs / factor).float(), scale(factor)


def larger_theta(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    theta *= factor ** (head_dim / (head_dim - 2))
    freqs, *_ = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    return freqs.float(), scale(factor)


def decimal_logarithm(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    new, _ = right_loop(head_dim, theta, factor, original_length, beta_fast, beta_slow)
    return new, 0.1 * math.log10(factor) + 1


def one_forgotten(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    new, _ = right_loop(head_dim, theta, factor, original_length, beta_fast, beta_slow)
    return new, 0.1 * math.log(factor)


def scale_for_scores(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    new, m = right_loop(head_dim, theta, factor, original_length, beta_fast, beta_slow)
    return new, m * m


def scale_inverted(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    new, m = right_loop(head_dim, theta, factor, original_length, beta_fast, beta_slow)
    return new, 1 / m


def ends_not_rounded(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    freqs, low, high = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    return mix(freqs, ramp(max(low, 0), high, len(freqs)), factor), scale(factor)


def both_rounded_down(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    freqs, low, high = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    gamma = ramp(max(int(low), 0), int(high), len(freqs))
    return mix(freqs, gamma, factor), scale(factor)


def rounded_to_nearest(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    freqs, low, high = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    gamma = ramp(max(round(low), 0), round(high), len(freqs))
    return mix(freqs, gamma, factor), scale(factor)


def betas_swapped(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    freqs, low, high = parts(head_dim, theta, original_length, beta_slow, beta_fast)
    gamma = ramp(max(math.floor(low), 0), math.ceil(high), len(freqs))
    return mix(freqs, gamma, factor), scale(factor)


def features_for_pairs(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    freqs, low, high = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    gamma = ramp(max(math.floor(2 * low), 0), math.ceil(2 * high), len(freqs))
    return mix(freqs, gamma, factor), scale(factor)


def radians_for_turns(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    r = 1 / (2 * math.pi)
    return right_loop(head_dim, theta, factor, original_length, beta_fast * r, beta_slow * r)


def longer_length_for_turns(
    head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0
):
    return right_loop(head_dim, theta, factor, original_length * factor, beta_fast, beta_slow)


def last_inside_head(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    freqs, low, high = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    gamma = ramp(max(math.floor(low), 0), min(math.ceil(high), len(freqs) - 1), len(freqs))
    return mix(freqs, gamma, factor), scale(factor)


def right_last_at_most_head_dim(
    head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0
):
    freqs, low, high = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    gamma = ramp(max(math.floor(low), 0), min(math.ceil(high), head_dim - 1), len(freqs))
    return mix(freqs, gamma, factor), scale(factor)


def last_at_most_number_of_pairs(
    head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0
):
    freqs, low, high = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    gamma = ramp(max(math.floor(low), 0), min(math.ceil(high), len(freqs)), len(freqs))
    return mix(freqs, gamma, factor), scale(factor)


def first_below_zero(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    freqs, low, high = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    gamma = ramp(math.floor(low), math.ceil(high), len(freqs))
    return mix(freqs, gamma, factor), scale(factor)


def ramp_not_limited(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    freqs, low, high = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    low, high = max(math.floor(low), 0), math.ceil(high)
    gamma = (torch.arange(len(freqs)) - low) / max(high - low, 1)
    return mix(freqs, gamma, factor), scale(factor)


def zero_by_zero(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    freqs, low, high = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    low, high = max(math.floor(low), 0), math.ceil(high)
    gamma = (torch.arange(len(freqs)) - low) / torch.tensor(high - low)
    return mix(freqs, gamma.clamp(0, 1), factor), scale(factor)


def step_includes_its_pair(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    freqs, low, high = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    low, high = max(math.floor(low), 0), math.ceil(high)
    i = torch.arange(len(freqs))
    gamma = (i >= low).float() if low == high else ramp(low, high, len(freqs))
    return mix(freqs, gamma, factor), scale(factor)


def wavelengths_mixed(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    freqs, low, high = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    gamma = ramp(max(math.floor(low), 0), math.ceil(high), len(freqs))
    waves = (1 - gamma) / freqs + gamma * factor / freqs
    return (1 / waves).float(), scale(factor)


def betas_fixed(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    return right_loop(head_dim, theta, factor, original_length)


def theta_fixed(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    return right_loop(head_dim, 10000.0, factor, original_length, beta_fast, beta_slow)


def theta_fixed_in_ramp(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    freqs, *_ = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    _, low, high = parts(head_dim, 10000.0, original_length, beta_fast, beta_slow)
    gamma = ramp(max(math.floor(low), 0), math.ceil(high), len(freqs))
    return mix(freqs, gamma, factor), scale(factor)


def original_length_of_qwen(
    head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0
):
    return right_loop(head_dim, theta, factor, 32768, beta_fast, beta_slow)


def gets_float64(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    new, m = right_loop(head_dim, theta, factor, original_length, beta_fast, beta_slow)
    return new.double(), m


def linear_in_turns(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    freqs, *_ = parts(head_dim, theta, original_length, beta_fast, beta_slow)
    turns = original_length * freqs / (2 * math.pi)
    gamma = 1 - ((turns - beta_slow) / (beta_fast - beta_slow)).clamp(0, 1)
    return mix(freqs, gamma, factor), scale(factor)


def scale_inside_speeds(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
    new, m = right_loop(head_dim, theta, factor, original_length, beta_fast, beta_slow)
    return new * m, m


ANSWERS = {
    slow_ones_kept: "fast pairs are slowed and slow ones kept: the ramp goes the other way",
    all_slowed: "all pairs are slowed, as in linear scaling",
    larger_theta: "a larger theta, as in NTK scaling, in the place of slower pairs",
    decimal_logarithm: "the logarithm to base 10 in the factor of the cosines",
    one_forgotten: "the factor of the cosines lacks the 1",
    scale_for_scores: "the factor of the scores, which is the square of that of cosines",
    scale_inverted: "",
    ends_not_rounded: "the ends of the ramp are not rounded",
    both_rounded_down: "both ends are rounded down",
    rounded_to_nearest: "the ends of the ramp are rounded to the nearest pair",
    betas_swapped: "beta_fast and beta_slow have changed places",
    features_for_pairs: "pairs are counted as features: D in the place of D / 2",
    radians_for_turns: "radians are taken for turns: 2 pi is missing",
    longer_length_for_turns: "the length after scaling, not that of training",
    last_inside_head: "the ramp must end at the last pair",
    last_at_most_number_of_pairs: "",
    first_below_zero: "the ramp may begin before the first pair",
    ramp_not_limited: "the ramp is not limited to 0 and 1",
    zero_by_zero: "0 / 0 where the ramp has no width",
    step_includes_its_pair: "where the ramp has no width, its pair is slowed too",
    wavelengths_mixed: "the times of a turn are mixed on the ramp, not the speeds",
    betas_fixed: "the betas are always 32 and 1",
    theta_fixed: "theta is always 10000",
    theta_fixed_in_ramp: "the ends of the ramp are always those of theta 10000",
    original_length_of_qwen: "",
    gets_float64: "",
    linear_in_turns: "a ramp in turns, as the paper writes and Llama 3 has it",
    scale_inside_speeds: "the speeds are multiplied by the factor of the cosines",
}
RIGHT = [right_loop, right_small_step, right_last_at_most_head_dim]
SILENT = [betas_swapped, zero_by_zero]
