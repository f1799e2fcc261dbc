"""Answers to the exercise hunt_repetition_penalty, written from its text alone."""

import torch


def bent(z, r):
    return torch.where(z < 0, z * r, z / r)


def right_gather(logits, idx, penalty):
    return logits.scatter(1, idx, bent(logits.gather(1, idx), penalty))


def right_rows(logits, idx, penalty):
    new = logits.clone()
    for row, text in zip(new, idx):
        for token in text.unique():
            row[token] *= penalty if row[token] < 0 else 1 / penalty
    return new


def only_signs_mended(logits, idx, penalty):
    said = idx[0].unique()
    new = logits.clone()
    new[:, said] = bent(logits[:, said], penalty)
    return new


def only_rows_mended(logits, idx, penalty):
    return logits.scatter(1, idx, logits.gather(1, idx) / penalty)


def every_text_bends_every_row(logits, idx, penalty):
    said = idx.unique()
    new = logits.clone()
    new[:, said] = bent(logits[:, said], penalty)
    return new


def once_per_occurrence(logits, idx, penalty):
    new = logits.clone()
    for row, text in zip(new, idx.tolist()):
        for token in text:
            row[token] = row[token] * penalty if row[token] < 0 else row[token] / penalty
    return new


def by_number_of_occurrences(logits, idx, penalty):
    times = torch.zeros_like(logits).scatter_add(1, idx, torch.ones_like(idx, dtype=logits.dtype))
    return bent(logits, penalty**times)


def subtracted(logits, idx, penalty):
    seen = torch.zeros_like(logits).scatter(1, idx, 1.0)
    return logits - penalty * seen


def logarithm_subtracted(logits, idx, penalty):
    seen = torch.zeros_like(logits).scatter(1, idx, 1.0)
    return logits - seen * torch.log(torch.tensor(penalty)).to(logits.dtype)


def by_absolute_value(logits, idx, penalty):
    seen = torch.zeros_like(logits).scatter(1, idx, 1.0)
    return logits - (penalty - 1) * logits.abs() * seen


def probabilities_divided(logits, idx, penalty):
    p = logits.softmax(1)
    return p.scatter(1, idx, p.gather(1, idx) / penalty).log().to(logits.dtype)


def log_probabilities_multiplied(logits, idx, penalty):
    z = logits.log_softmax(1)
    return z.scatter(1, idx, z.gather(1, idx) * penalty)


def always_multiplied(logits, idx, penalty):
    return logits.scatter(1, idx, logits.gather(1, idx) * penalty)


def signs_swapped(logits, idx, penalty):
    return logits.scatter(1, idx, bent(logits.gather(1, idx), 1 / penalty))


def never_a_reward(logits, idx, penalty):
    return right_gather(logits, idx, max(penalty, 1.0))


def rule_turned_below_one(logits, idx, penalty):
    return right_gather(logits, idx, penalty if penalty > 1 else 1 / penalty)


def writes_into_logits(logits, idx, penalty):
    return logits.scatter_(1, idx, bent(logits.gather(1, idx), penalty))


def all_tokens(logits, idx, penalty):
    return bent(logits, penalty)


def unseen_tokens(logits, idx, penalty):
    return bent(logits, penalty).scatter(1, idx, logits.gather(1, idx))


def last_token_only(logits, idx, penalty):
    return right_gather(logits, idx[:, -1:], penalty)


def last_token_left_out(logits, idx, penalty):
    return right_gather(logits, idx[:, :-1], penalty)


def zero_is_padding(logits, idx, penalty):
    new = right_gather(logits, idx, penalty)
    new[:, 0] = logits[:, 0]
    return new


def by_weights(logits, idx, penalty):
    seen = torch.zeros_like(logits).scatter(1, idx, 1.0)
    return (1 - seen) * logits + seen * bent(logits, penalty)


def infinity_becomes_large(logits, idx, penalty):
    return right_gather(logits.clamp(min=torch.finfo(logits.dtype).min / 4), idx, penalty)


def nan_to_zero(logits, idx, penalty):
    seen = torch.zeros_like(logits).scatter(1, idx, 1.0)
    change = (bent(logits, penalty) - logits) * seen
    return logits.nan_to_num() + change.nan_to_num()


def shifted_by_the_largest(logits, idx, penalty):
    top = logits.amax(1, keepdim=True)
    return top + right_gather(logits - top, idx, penalty)


def stays_float32(logits, idx, penalty):
    return right_gather(logits.float(), idx, penalty)


def sign_of_the_first_row(logits, idx, penalty):
    factor = torch.where(logits[0] > 0, 1 / penalty, penalty)
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, idx, True)
    return torch.where(seen, logits * factor.to(logits.dtype), logits)


def rows_bent_in_turn(logits, idx, penalty):
    new = logits.clone()
    for text in idx:
        said = text.unique()
        new[:, said] = bent(new[:, said], penalty)
    return new


ANSWERS = {
    only_signs_mended: "the sign counts now, but the tokens are still those of row 0",
    only_rows_mended: "each row has its own tokens now, but a negative logit is still divided",
    every_text_bends_every_row: "the tokens of all rows are bent in every row",
    once_per_occurrence: "bent once for each occurrence",
    by_number_of_occurrences: "bent once for each occurrence",
    subtracted: "the penalty is subtracted",
    logarithm_subtracted: "the probability is divided, not the logit",
    by_absolute_value: "",
    probabilities_divided: "",
    log_probabilities_multiplied: "log-probabilities are bent, not logits",
    always_multiplied: "every logit is multiplied",
    signs_swapped: "positive logits are multiplied, negative ones divided",
    never_a_reward: "a penalty below 1 is taken for 1",
    rule_turned_below_one: "the smaller of quotient and product, whatever the penalty",
    writes_into_logits: "written into the caller's logits",
    all_tokens: "every token of the vocabulary is bent",
    unseen_tokens: "the tokens that have not occurred are bent",
    last_token_only: "only the last token of each row is bent",
    last_token_left_out: "the last token of each row is not bent",
    zero_is_padding: "token 0 is taken for padding",
    by_weights: "a sum with a mask of zeros and ones",
    infinity_becomes_large: "",
    nan_to_zero: "",
    shifted_by_the_largest: "",
    stays_float32: "the result is float32",
    sign_of_the_first_row: "one sign for a token in all rows",
    rows_bent_in_turn: "the tokens of all rows are bent in every row",
}
RIGHT = [right_gather, right_rows]
SILENT = [by_weights, stays_float32]
