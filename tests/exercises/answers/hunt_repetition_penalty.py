"""Answers to hunt_repetition_penalty: other right ones, and wrong ones of a second person."""

import torch


def by_gather(logits, idx, penalty):
    """Take the logits of the tokens, bend them, and put them back."""
    taken = logits.gather(1, idx)
    return logits.scatter(1, idx, torch.where(taken < 0, taken * penalty, taken / penalty))


def by_loop(logits, idx, penalty):
    """Row by row and token by token."""
    result = logits.clone()
    for row, tokens in enumerate(idx.tolist()):
        for token in set(tokens):
            z = logits[row, token].item()
            result[row, token] = z / penalty if z > 0 else z * penalty
    return result


def by_power(logits, idx, penalty):
    """A factor for each token: the penalty to the power of minus the sign, in float64."""
    factor = torch.ones_like(logits, dtype=torch.float64)
    bend = penalty ** -logits.double().sign()
    factor.scatter_(1, idx, bend.gather(1, idx))
    return (logits.double() * factor).to(logits.dtype)


def by_parts(logits, idx, penalty):
    """The positive part divided, the negative part multiplied, where a token occurs."""
    tokens = torch.arange(logits.shape[-1])
    seen = (idx[:, :, None] == tokens).any(dim=1)  # (B, V)
    bent = logits.clamp(min=0) / penalty + logits.clamp(max=0) * penalty
    return logits.where(~seen, bent)


RIGHT = [by_gather, by_loop, by_power, by_parts]

BENT = "torch.where(logits > 0, logits / penalty, logits * penalty)"
RESULT = "return torch.where(seen, penalised, logits)"

WRONG = [
    ("a share of the absolute value is subtracted",
     {BENT: "logits - (penalty - 1) * logits.abs()"}),
    ("probabilities are divided",
     {BENT: "(logits.softmax(1) / penalty).log()",
      RESULT: "return torch.where(seen, penalised, logits.softmax(1).log())"}),
    ("minus infinity becomes a large number",
     {"    seen =":
      "    logits = logits.clamp(min=torch.finfo(logits.dtype).min / 4)\n    seen ="}),
    ("infinity times 0 is replaced",
     {RESULT: "return logits.nan_to_num() + ((penalised - logits) * seen).nan_to_num()"}),
    ("the largest logit is subtracted first",
     {"    seen =": "    top = logits.amax(1, keepdim=True)\n    logits = logits - top\n    seen =",
      RESULT: f"{RESULT} + top"}),
]  # fmt: skip

SURVIVORS = {
    "penalised = torch.where(logits > 0, logits / penalty, logits * penalty): "
    "logits > 0 => logits >= 0": "a logit of 0 stays 0, divided or multiplied"
}
