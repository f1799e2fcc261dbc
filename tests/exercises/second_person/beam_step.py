"""Answers to the exercise beam_step, written from its text alone."""

import torch

NEVER = float("-inf")


def candidates(scores, log_probs):
    return log_probs + scores.unsqueeze(-1)


def without_stop(total, stop):
    keep = torch.ones_like(total, dtype=torch.bool)
    keep[..., stop] = False
    return torch.where(keep, total, NEVER)


def best(total, n):
    value, at = total.reshape(len(total), -1).sort(dim=-1, descending=True)
    v = total.shape[-1]
    return value[:, :n], torch.div(at[:, :n], v, rounding_mode="floor"), at[:, :n].remainder(v)


def ends(total, stop, n):
    value, parent, token = best(total, n)
    ended = torch.full(value.shape, NEVER, dtype=total.dtype)
    for i in range(len(value)):
        for s, b, t in zip(value[i], parent[i], token[i]):
            if t == stop:
                ended[i, b] = s
    return ended


def right_sorted(scores, log_probs, stop):
    n, total = scores.shape[1], candidates(scores, log_probs)
    return *best(without_stop(total, stop), n), ends(total, stop, n)


def right_twice_as_many(scores, log_probs, stop):
    n, total = scores.shape[1], candidates(scores, log_probs)
    value, parent, token = best(total, 2 * n)
    going = token != stop
    place = torch.argsort(~going, dim=1, stable=True)[:, :n]
    next_beams = (x.gather(1, place) for x in (value, parent, token))
    return *next_beams, ends(total, stop, n)


def each_beam_goes_on(scores, log_probs, stop):
    total = without_stop(candidates(scores, log_probs), stop)
    value, token = total.max(-1)
    place = value.argsort(dim=1, descending=True)
    n = scores.shape[1]
    ended = ends(candidates(scores, log_probs), stop, n)
    return value.gather(1, place), place, token.gather(1, place), ended


def prompts_mixed(scores, log_probs, stop):
    n, total = scores.shape[1], candidates(scores, log_probs)
    value, at = without_stop(total, stop).flatten().topk(scores.numel())
    v = total.shape[-1]
    parts = (value, at // v % n, at % v)
    return *(p.view(scores.shape) for p in parts), ends(total, stop, n)


def scores_forgotten(scores, log_probs, stop):
    return right_sorted(torch.zeros_like(scores), log_probs, stop)


def stop_goes_on(scores, log_probs, stop):
    n, total = scores.shape[1], candidates(scores, log_probs)
    return *best(total, n), ends(total, stop, n)


def every_end_counts(scores, log_probs, stop):
    n, total = scores.shape[1], candidates(scores, log_probs)
    return *best(without_stop(total, stop), n), total[..., stop].clone()


def ends_beside_those_that_go_on(scores, log_probs, stop):
    n, total = scores.shape[1], candidates(scores, log_probs)
    going = best(without_stop(total, stop), n)
    end = total[..., stop]
    return *going, end.where(end > going[0][:, -1:], NEVER)


def ends_in_order_of_rank(scores, log_probs, stop):
    n, total = scores.shape[1], candidates(scores, log_probs)
    value, _, token = best(total, n)
    return *best(without_stop(total, stop), n), value.where(token == stop, NEVER)


def fewer_beams_after_an_end(scores, log_probs, stop):
    n, total = scores.shape[1], candidates(scores, log_probs)
    value, parent, token = best(total, n)
    return value.where(token != stop, NEVER), parent, token, ends(total, stop, n)


def ends_only_from_best_beam(scores, log_probs, stop):
    n, total = scores.shape[1], candidates(scores, log_probs)
    ended = ends(total, stop, n)
    ended[:, 1:] = NEVER
    return *best(without_stop(total, stop), n), ended


def parents_and_tokens_swapped(scores, log_probs, stop):
    value, parent, token, ended = right_sorted(scores, log_probs, stop)
    return value, token, parent, ended


def divided_by_number_of_beams(scores, log_probs, stop):
    n, total = scores.shape[1], candidates(scores, log_probs)
    value, at = without_stop(total, stop).flatten(1).topk(n)
    return value, at // n, at % n, ends(total, stop, n)


def flattened_tokens_first(scores, log_probs, stop):
    n, total = scores.shape[1], candidates(scores, log_probs)
    value, at = without_stop(total, stop).mT.flatten(1).topk(n)
    return value, at // n, at % n, ends(total, stop, n)


def product_of_probabilities(scores, log_probs, stop):
    product = scores.exp()[..., None] * log_probs.exp()
    n, total = scores.shape[1], product.log()
    return *best(without_stop(total, stop), n), ends(total, stop, n)


def average_of_both(scores, log_probs, stop):
    n, total = scores.shape[1], candidates(scores, log_probs) / 2
    return *best(without_stop(total, stop), n), ends(total, stop, n)


def worst_first(scores, log_probs, stop):
    value, parent, token, ended = right_sorted(scores, log_probs, stop)
    return value.flip(1), parent.flip(1), token.flip(1), ended


def writes_into_log_probs(scores, log_probs, stop):
    n, total = scores.shape[1], candidates(scores, log_probs)
    ended = ends(total, stop, n)
    log_probs[..., stop] = NEVER
    return *best(candidates(scores, log_probs), n), ended


def large_number_for_minus_infinity(scores, log_probs, stop):
    n, total = scores.shape[1], candidates(scores, log_probs)
    going = total.clone()
    going[..., stop] = -100.0
    return *best(going, n), ends(total, stop, n)


def at_most_one_end(scores, log_probs, stop):
    n, total = scores.shape[1], candidates(scores, log_probs)
    ended = ends(total, stop, n)
    ended = ended.where(ended == ended.amax(1, keepdim=True), NEVER)
    return *best(without_stop(total, stop), n), ended


def ends_are_flags(scores, log_probs, stop):
    *going, ended = right_sorted(scores, log_probs, stop)
    return *going, ended > NEVER


def n_of_each_beam(scores, log_probs, stop):
    n, total = scores.shape[1], candidates(scores, log_probs)
    value, token = without_stop(total, stop).topk(n, dim=-1)
    best_value, at = value.flatten(1).topk(n)
    return best_value, at // n, token.flatten(1).gather(1, at), ends(total, stop, n)


def normalised_again(scores, log_probs, stop):
    n, total = scores.shape[1], candidates(scores, log_probs)
    total = total.flatten(1).log_softmax(1).view_as(total)
    return *best(without_stop(total, stop), n), ends(total, stop, n)


def stop_taken_out_before_softmax(scores, log_probs, stop):
    n, total = scores.shape[1], candidates(scores, log_probs)
    others = without_stop(log_probs, stop).log_softmax(-1)
    return *best(candidates(scores, others), n), ends(total, stop, n)


ANSWERS = {
    each_beam_goes_on: "",
    prompts_mixed: "the best of the whole batch, not of each prompt",
    scores_forgotten: "the scores of the beams are left out",
    stop_goes_on: "a candidate with the stop token goes on",
    every_end_counts: "every stop token is an end, however unlikely",
    ends_beside_those_that_go_on: "an end is compared with what goes on, not with all candidates",
    ends_in_order_of_rank: "ends are listed by score, not by beam",
    fewer_beams_after_an_end: "the place of an end stays empty",
    ends_only_from_best_beam: "only beam 0 may end",
    parents_and_tokens_swapped: "parent and token exchanged",
    divided_by_number_of_beams: "the place is divided by n, not by V",
    flattened_tokens_first: "parent and token exchanged",
    product_of_probabilities: "probabilities in the place of logarithms",
    average_of_both: "",
    worst_first: "the worst of the best comes first",
    writes_into_log_probs: "written into the caller's log_probs",
    large_number_for_minus_infinity: "-100 in the place of minus infinity",
    at_most_one_end: "at most one candidate may end",
    ends_are_flags: "",
    n_of_each_beam: "the n best of each beam are looked for, where there may be fewer",
    normalised_again: "",
    stop_taken_out_before_softmax: "",
}
RIGHT = [right_sorted, right_twice_as_many]
SILENT = [product_of_probabilities, large_number_for_minus_infinity, n_of_each_beam]
