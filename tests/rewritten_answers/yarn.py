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


def last_at_most_head_dim(head_dim, theta, factor, original_length, beta_fast=32.0, beta_slow=1.0):
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
    slow_ones_kept: "",
    all_slowed: "",
    larger_theta: "",
    decimal_logarithm: "",
    one_forgotten: "",
    scale_for_scores: "",
    scale_inverted: "",
    ends_not_rounded: "",
    both_rounded_down: "",
    rounded_to_nearest: "",
    betas_swapped: "",
    features_for_pairs: "",
    radians_for_turns: "",
    longer_length_for_turns: "",
    last_inside_head: "",
    last_at_most_head_dim: "",
    last_at_most_number_of_pairs: "",
    first_below_zero: "",
    ramp_not_limited: "",
    zero_by_zero: "",
    step_includes_its_pair: "",
    wavelengths_mixed: "",
    betas_fixed: "",
    theta_fixed: "",
    theta_fixed_in_ramp: "",
    original_length_of_qwen: "",
    gets_float64: "",
    linear_in_turns: "",
    scale_inside_speeds: "",
}
RIGHT = [right_loop, right_small_step]
