"""Answers to cross_entropy, written from its text by a second person."""

import torch


def refuse(logits, targets):
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets {list(targets.shape)}, logits {list(logits.shape)}")


def wide(logits):
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def chosen_rows_only(logits, targets):
    """Right: the rows without a target are thrown away first."""
    refuse(logits, targets)
    keep = targets != -100
    z, y = wide(logits)[keep], targets[keep]
    each = z.logsumexp(-1) - z[torch.arange(len(y)), y]
    return each.sum() / max(len(y), 1)


def losses(z, targets):
    y = targets.clamp(min=0)
    each = z.logsumexp(-1) - z.gather(-1, y[..., None])[..., 0]
    return torch.where(targets != -100, each, 0.0)


def divided_by_all_tokens(logits, targets):
    refuse(logits, targets)
    return losses(wide(logits), targets).mean()


def mean_of_row_means(logits, targets):
    refuse(logits, targets)
    each = losses(wide(logits), targets)
    if each.dim() == 1:
        each, targets = each[None], targets[None]
    rows = each.sum(-1) / (targets != -100).sum(-1).clamp(min=1)
    return rows.mean()


def summed(logits, targets):
    refuse(logits, targets)
    return losses(wide(logits), targets).sum()


def logarithm_of_softmax(logits, targets):
    refuse(logits, targets)
    keep = targets != -100
    p = wide(logits)[keep].softmax(-1).gather(1, targets[keep].unsqueeze(1))
    return -p.log().sum() / keep.sum().clamp(min=1)


def small_number_in_the_logarithm(logits, targets):
    refuse(logits, targets)
    keep = targets != -100
    p = wide(logits)[keep].softmax(-1).gather(1, targets[keep].unsqueeze(1))
    return -(p + 1e-12).log().sum() / keep.sum().clamp(min=1)


def exponentials_summed_as_they_are(logits, targets):
    refuse(logits, targets)
    keep = targets != -100
    z, y = wide(logits)[keep], targets[keep]
    each = z.exp().sum(-1).log() - z.gather(1, y[:, None]).squeeze(1)
    return each.sum() / keep.sum().clamp(min=1)


def one_maximum_for_all(logits, targets):
    refuse(logits, targets)
    keep = targets != -100
    z, y = wide(logits)[keep], targets[keep]
    if not len(y):
        return logits.float().nan_to_num(0, 0, 0).sum() * 0
    z = z - z.max()
    return (z.exp().sum(-1).log() - z.gather(1, y[:, None]).squeeze(1)).mean()


def mean_of_nothing(logits, targets):
    refuse(logits, targets)
    z = wide(logits).flatten(0, -2)[targets.flatten() != -100]
    y = targets[targets != -100]
    return (z.logsumexp(-1) - z.gather(1, y[:, None])[:, 0]).mean()


def weighted_by_zero(logits, targets):
    refuse(logits, targets)
    y = targets.clamp(min=0)
    logp = wide(logits).log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    weight = (targets != -100).to(logp.dtype)
    return -(logp * weight).sum() / weight.sum().clamp(min=1)


def one_hot_product(logits, targets):
    refuse(logits, targets)
    keep = targets != -100
    logp = wide(logits)[keep].log_softmax(-1)
    hot = torch.nn.functional.one_hot(targets[keep], logits.shape[-1])
    return -(logp * hot).sum() / keep.sum().clamp(min=1)


def shifted_once_more(logits, targets):
    refuse(logits, targets)
    return chosen_rows_only(logits[..., :-1, :], targets[..., 1:])


def in_bits(logits, targets):
    return chosen_rows_only(logits, targets) / 0.6931471805599453


def flattened_without_a_look(logits, targets):
    return chosen_rows_only(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))


def token_zero_ignored(logits, targets):
    refuse(logits, targets)
    return chosen_rows_only(logits, torch.where(targets > 0, targets, -100))


def minus_one_is_ignored(logits, targets):
    refuse(logits, targets)
    keep = targets != -1
    z = wide(logits).log_softmax(-1)[keep]
    return -z.gather(1, targets[keep][:, None]).sum() / keep.sum().clamp(min=1)


def negative_index(logits, targets):
    refuse(logits, targets)
    z, y = wide(logits).flatten(0, -2), targets.flatten()
    return (z.logsumexp(-1) - z[torch.arange(len(y)), y])[y != -100].sum() / max(1, sum(y != -100))


def half_stays_half(logits, targets):
    refuse(logits, targets)
    return losses(logits, targets).sum() / (targets != -100).sum().clamp(min=1)


def back_to_half(logits, targets):
    return chosen_rows_only(logits, targets).to(logits.dtype)


def float32_always(logits, targets):
    return chosen_rows_only(logits.float(), targets)


def targets_overwritten(logits, targets):
    refuse(logits, targets)
    keep = targets != -100
    targets[~keep] = 0
    each = wide(logits).logsumexp(-1) - wide(logits).gather(-1, targets[..., None])[..., 0]
    return each[keep].sum() / keep.sum().clamp(min=1)


def python_number(logits, targets):
    return chosen_rows_only(logits, targets).item()


def zero_without_gradient(logits, targets):
    refuse(logits, targets)
    if (targets == -100).all():
        return torch.tensor(0.0, dtype=wide(logits).dtype)
    return chosen_rows_only(logits, targets)


def plus_sign(logits, targets):
    return -chosen_rows_only(logits, targets)


def two_axes_before_the_last(logits, targets):
    refuse(logits, targets)
    return chosen_rows_only(logits.flatten(1, -2), targets.flatten(1))


ANSWERS = {
    divided_by_all_tokens: "ignored targets are in the number to divide by",
    mean_of_row_means: (
        "the mean of the means of the rows, where a short row weighs as much as a long one"
    ),
    summed: "the sum in the place of the mean",
    logarithm_of_softmax: "the logarithm of a softmax that is rounded to 0",
    small_number_in_the_logarithm: (
        "something small is added to the probability before the logarithm"
    ),
    exponentials_summed_as_they_are: "nothing is subtracted before exp, which overflows",
    one_maximum_for_all: "one maximum for all tokens, far above some of them",
    mean_of_nothing: "no target at all gives NaN",
    weighted_by_zero: "an infinite loss times 0",
    one_hot_product: "",
    shifted_once_more: "the targets are shifted once more, though they are the next tokens already",
    in_bits: "bits in the place of nats",
    flattened_without_a_look: "flattened without a look at the shapes",
    token_zero_ignored: "token 0 is ignored too, as if it were padding",
    minus_one_is_ignored: "",
    negative_index: "-100 is taken as an index from the end of the vocabulary",
    half_stays_half: "the loss of bfloat16 is rounded to bfloat16",
    back_to_half: "the loss of bfloat16 is rounded to bfloat16",
    float32_always: "float64 is computed in float32",
    targets_overwritten: "the ignored targets are overwritten in the caller's tensor",
    python_number: "",
    zero_without_gradient: "no target at all gives a number without a gradient",
    plus_sign: "the sign is missing",
    two_axes_before_the_last: "only for logits with two axes or more before the last",
}
RIGHT = [chosen_rows_only]
SILENT = [
    small_number_in_the_logarithm,
    mean_of_nothing,
    weighted_by_zero,
    negative_index,
    float32_always,
    two_axes_before_the_last,
]
