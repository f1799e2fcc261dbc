"""Answers to the exercise top_p, written from its text alone."""

import torch

NEVER = float("-inf")


def keep_k(logits, k):
    if k == 0 or k >= logits.shape[-1]:
        return logits
    border = logits.sort(dim=-1).values[:, -k]
    return torch.where(logits < border.unsqueeze(-1), NEVER, logits)


def above_zero(p):
    if not p > 0:
        raise ValueError(p)


def ranked(logits):
    value, place = torch.sort(logits.float(), dim=-1, descending=True)
    return value.softmax(-1), place


def back(logits, drop, place, fill=NEVER):
    mask = torch.empty_like(drop)
    mask.scatter_(-1, place, drop)
    return logits.masked_fill(mask, fill)


def drop_after(p, top_p):
    """Whether the tokens before, without this one, reach top_p."""
    before = torch.zeros_like(p)
    before[:, 1:] = p.cumsum(-1)[:, :-1]
    return before >= top_p


def nucleus(logits, top_p, drops=drop_after, fill=NEVER):
    p, place = ranked(logits)
    return back(logits, drops(p, top_p), place, fill)


def right_shifted_mask(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    logits = keep_k(logits, top_k)
    if top_p >= 1:
        return logits.clone()
    p, place = ranked(logits)
    drop = p.cumsum(-1) >= top_p
    drop = torch.cat((torch.zeros_like(drop[:, :1]), drop[:, :-1]), -1)
    return back(logits, drop, place)


def right_token_by_token(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    logits = keep_k(logits, top_k)
    if top_p == 1:
        return logits
    out = torch.full_like(logits, NEVER)
    for row, new in zip(logits, out):
        p, total = row.double().softmax(0), 0.0
        for token in p.argsort(descending=True).tolist():
            new[token] = row[token]
            total += p[token].item()
            if total >= top_p - 1e-12:
                break
    return out


def crossing_token_dropped(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    logits = keep_k(logits, top_k)
    if top_p == 1:
        return logits

    def drops(p, q):
        drop = p.cumsum(-1) > q
        drop[:, 0] = False
        return drop

    return nucleus(logits, top_p, drops)


def nothing_may_stay(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    logits = keep_k(logits, top_k)
    if top_p == 1:
        return logits
    return nucleus(logits, top_p, lambda p, q: p.cumsum(-1) > q)


def one_more(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    logits = keep_k(logits, top_k)
    if top_p == 1:
        return logits
    return nucleus(
        logits, top_p, lambda p, q: drop_after(torch.cat((p[:, :1] * 0, p[:, :-1]), -1), q)
    )


def more_at_exactly_p(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    logits = keep_k(logits, top_k)
    if top_p == 1:
        return logits
    return nucleus(logits, top_p, lambda p, q: p.cumsum(-1) - p > q)


def rare_tokens_first(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    logits = keep_k(logits, top_k)
    if top_p == 1:
        return logits
    value, place = logits.float().sort(dim=-1)
    p = value.softmax(-1)
    return back(logits, p.cumsum(-1) - p >= top_p, place)


def stays_sorted(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    logits = keep_k(logits, top_k)
    if top_p == 1:
        return logits
    value, _ = logits.sort(dim=-1, descending=True)
    return value.masked_fill(drop_after(value.float().softmax(-1), top_p), NEVER)


def mask_gathered(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    logits = keep_k(logits, top_k)
    if top_p == 1:
        return logits
    p, place = ranked(logits)
    return logits.masked_fill(drop_after(p, top_p).gather(-1, place), NEVER)


def mask_in_sorted_order(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    logits = keep_k(logits, top_k)
    if top_p == 1:
        return logits
    p, _ = ranked(logits)
    return logits.masked_fill(drop_after(p, top_p), NEVER)


def top_p_first(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    if top_p < 1:
        logits = nucleus(logits, top_p)
    return keep_k(logits, top_k)


def probabilities_of_all_tokens(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    cut = keep_k(logits, top_k)
    return cut if top_p == 1 else cut.masked_fill(nucleus(logits, top_p) == NEVER, NEVER)


def large_k_raises(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], NEVER)
    return logits if top_p == 1 else nucleus(logits, top_p)


def zero_k_is_one(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    logits = keep_k(logits, max(top_k, 1))
    return logits if top_p == 1 else nucleus(logits, top_p)


def one_cuts_too(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    return nucleus(keep_k(logits, top_k), top_p)


def fill_of_minus_ten_thousand(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    out = right_shifted_mask(logits, top_k, top_p)
    return out.clamp(min=-1e4)


def fill_of_zero(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    out = right_shifted_mask(logits, top_k, top_p)
    return out.masked_fill(out == NEVER, 0.0)


def border_by_probability(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    logits = keep_k(logits, top_k)
    if top_p == 1:
        return logits
    p, _ = ranked(logits)
    last = (~drop_after(p, top_p)).sum(-1, keepdim=True) - 1
    return logits.masked_fill(logits.float().softmax(-1) < p.gather(-1, last), NEVER)


def exactly_k(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    if 0 < top_k < logits.shape[-1]:
        value, place = logits.topk(top_k)
        logits = torch.full_like(logits, NEVER).scatter(-1, place, value)
    return logits if top_p == 1 else nucleus(logits, top_p)


def each_probability_above_p(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    logits = keep_k(logits, top_k)
    if top_p == 1:
        return logits
    p = logits.float().softmax(-1)
    return logits.masked_fill((p < 1 - top_p) & (p < p.amax(-1, keepdim=True)), NEVER)


def sums_in_own_dtype(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    logits = keep_k(logits, top_k)
    if top_p == 1:
        return logits
    value, place = logits.sort(dim=-1, descending=True)
    return back(logits, drop_after(value.softmax(-1), top_p), place)


def only_sum_in_own_dtype(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    logits = keep_k(logits, top_k)
    if top_p == 1:
        return logits
    p, place = ranked(logits)
    return back(logits, drop_after(p.to(logits.dtype), top_p), place)


def plain_exponential(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    logits = keep_k(logits, top_k)
    if top_p == 1:
        return logits
    value, place = logits.float().sort(dim=-1, descending=True)
    p = value.exp() / value.exp().sum(-1, keepdim=True)
    return back(logits, drop_after(p, top_p), place)


def writes_into_logits(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    return logits.copy_(right_shifted_mask(logits, top_k, top_p))


def border_of_the_first_row(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits[0].topk(top_k).values[-1], NEVER)
    return logits if top_p == 1 else nucleus(logits, top_p)


def same_number_in_all_rows(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    logits = keep_k(logits, top_k)
    if top_p == 1:
        return logits
    return nucleus(logits, top_p, lambda p, q: drop_after(p, q)[:1].expand_as(p))


def k_from_all_rows(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.flatten().topk(top_k).values[-1], NEVER)
    return logits if top_p == 1 else nucleus(logits, top_p)


def returns_probabilities(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    return right_shifted_mask(logits, top_k, top_p).softmax(-1)


def renormalised(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    return right_shifted_mask(logits, top_k, top_p).log_softmax(-1)


def stays_float32(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    return right_shifted_mask(logits.float(), top_k, top_p)


def one_token_too_many_by_k(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    return right_shifted_mask(logits, top_k + 1 if top_k else 0, top_p)


def k_off_if_p_is_given(logits, top_k=0, top_p=1.0):
    above_zero(top_p)
    return nucleus(logits, top_p) if top_p < 1 else keep_k(logits, top_k)


def tail_summed_from_the_end(logits, top_k=0, top_p=1.0):
    """As in transformers: it is right but for the exact border."""
    above_zero(top_p)
    logits = keep_k(logits, top_k)
    if top_p == 1:
        return logits
    value, place = logits.float().sort(dim=-1)
    return back(logits, value.softmax(-1).cumsum(-1) < 1 - top_p, place)


ANSWERS = {
    crossing_token_dropped: "the token that reaches p is cut, too",
    nothing_may_stay: "the token that reaches p is cut, too",
    one_more: "one token more than it takes to reach p",
    more_at_exactly_p: "one token too many where the sum is exactly p",
    rare_tokens_first: "sorted from the least likely",
    stays_sorted: "the result stays sorted",
    mask_gathered: "the mask is gathered by the order, not scattered",
    mask_in_sorted_order: "the mask stays in sorted order",
    top_p_first: "top-p counts with the tokens that top-k has cut",
    probabilities_of_all_tokens: "top-p counts with the tokens that top-k has cut",
    large_k_raises: "a k above V is refused",
    zero_k_is_one: "a k of 0 keeps one token",
    one_cuts_too: "top-p cuts at 1.0, where it should be off",
    fill_of_minus_ten_thousand: "a finite number in the place of minus infinity",
    fill_of_zero: "what is cut gets the logit 0",
    border_by_probability: "all tokens that equal the last one kept by top-p stay",
    exactly_k: "exactly k tokens stay, whichever come first of equal ones",
    each_probability_above_p: "tokens less likely than 1 - p are cut",
    sums_in_own_dtype: "the sums are in half precision",
    only_sum_in_own_dtype: "the sums are in half precision",
    plain_exponential: "exp without the maximum subtracted",
    writes_into_logits: "written into the caller's logits",
    border_of_the_first_row: "",
    same_number_in_all_rows: "as many tokens in every row as in the first",
    k_from_all_rows: "",
    returns_probabilities: "the result is probabilities",
    renormalised: "the result is log-probabilities",
    stays_float32: "the result is float32",
    one_token_too_many_by_k: "one token more than k",
    k_off_if_p_is_given: "top-k is left out where top-p is given",
    tail_summed_from_the_end: "one token too many where the sum is exactly p",
}
RIGHT = [right_shifted_mask, right_token_by_token]
SILENT = [large_k_raises, fill_of_minus_ten_thousand, each_probability_above_p]
