"""Answers to the exercise speculative, written from its text alone."""

import torch


def pick(weights, u):
    line = weights.double().cumsum(-1)
    point = u.double()[:, None] * line[:, -1:]
    token = torch.searchsorted(line, point, right=True)[:, 0]
    return token.clamp(max=weights.shape[-1] - 1)


def row_by_row(p, q, draft, u, accept, left):
    counts, tokens = [], []
    for i, row in enumerate(draft.tolist()):
        n = 0
        while n < len(row) and row[n] >= 0 and accept(u[i, 1 + n], p[i, n], q[i, n], row[n]):
            n += 1
        judged = n < len(row) and row[n] >= 0
        weights = left(p[i, n], q[i, n], row[n]) if judged else p[i, n]
        counts.append(n)
        tokens.append(pick(weights[None], u[i, :1]))
    return torch.tensor(counts), torch.cat(tokens)


def fair(u, p, q, x):
    return u * q[x] < p[x]


def rest(p, q, x):
    weights = torch.relu(p - q)
    return weights if weights.sum() > 0 else p


def right_rows(p, q, draft, u):
    return row_by_row(p, q, draft, u, fair, rest)


def right_at_all_places(p, q, draft, u):
    rows, k = draft.shape
    real = draft.ge(0)
    full = torch.zeros_like(p)
    full[:, :k] = torch.where(real[..., None], q, 0.0)
    left = torch.maximum(p - full, torch.zeros_like(p))
    left = torch.where(left.amax(-1, keepdim=True) > 0, left, p)
    at = draft.clamp(0)[..., None]
    good = (u[:, 1:] * q.gather(-1, at).squeeze(-1) < p[:, :k].gather(-1, at).squeeze(-1)) & real
    stopped = torch.cat((~good, torch.ones(rows, 1, dtype=torch.bool)), 1)
    n = stopped.int().argmax(1)
    return n, pick(left[torch.arange(rows), n], u[:, 0])


def equal_accepts(p, q, draft, u):
    return row_by_row(p, q, draft, u, lambda u, p, q, x: u * q[x] <= p[x], rest)


def q_forgotten(p, q, draft, u):
    return row_by_row(p, q, draft, u, lambda u, p, q, x: u < p[x], rest)


def quotient_upside_down(p, q, draft, u):
    return row_by_row(p, q, draft, u, lambda u, p, q, x: u * p[x] < q[x], rest)


def accepted_if_p_is_larger(p, q, draft, u):
    return row_by_row(p, q, draft, u, lambda u, p, q, x: p[x] >= q[x], rest)


def accepted_if_most_likely(p, q, draft, u):
    return row_by_row(p, q, draft, u, lambda u, p, q, x: p.argmax() == x, rest)


def drawn_from_p(p, q, draft, u):
    return row_by_row(p, q, draft, u, fair, lambda p, q, x: p)


def drawn_from_p_without_the_draft(p, q, draft, u):
    def left(p, q, x):
        other = p.clone()
        other[x] = 0
        return other

    return row_by_row(p, q, draft, u, fair, left)


def drawn_from_q(p, q, draft, u):
    return row_by_row(p, q, draft, u, fair, lambda p, q, x: q)


def absolute_difference(p, q, draft, u):
    return row_by_row(p, q, draft, u, fair, lambda p, q, x: (p - q).abs())


def difference_upside_down(p, q, draft, u):
    return row_by_row(p, q, draft, u, fair, lambda p, q, x: torch.relu(q - p))


def nothing_left_over(p, q, draft, u):
    return row_by_row(p, q, draft, u, fair, lambda p, q, x: torch.relu(p - q))


def all_that_are_accepted(p, q, draft, u):
    """Drafts after a rejected one count, too."""
    n = torch.tensor([
        sum(x >= 0 and bool(fair(u[i, 1 + k], p[i, k], q[i, k], x)) for k, x in enumerate(row))
        for i, row in enumerate(draft.tolist())
    ])  # fmt: skip
    _, token = right_rows(p, q, draft, u)
    return n.long(), token


def judged_by_u_of_its_place(p, q, draft, u):
    return right_rows(p, q, draft, u.roll(1, 1))


def one_number_for_all(p, q, draft, u):
    return right_rows(p, q, draft, u[:, :1].expand_as(u))


def padding_is_the_last_token(p, q, draft, u):
    return right_rows(p, q, draft.remainder(p.shape[-1]), u)


def padding_is_token_zero(p, q, draft, u):
    return right_rows(p, q, draft.clamp(min=0), u)


def padding_subtracts_q(p, q, draft, u):
    n, _ = right_rows(p, q, draft, u)
    full = torch.cat((q, torch.zeros_like(p[:, :1])), 1)
    rows = torch.arange(len(n))
    left = torch.relu(p - full)[rows, n]
    left = torch.where(left.sum(1, keepdim=True) > 0, left, p[rows, n])
    return n, pick(left, u[:, 0])


def bonus_from_the_last_draft(p, q, draft, u):
    n, _ = right_rows(p, q, draft, u)
    rows, last = torch.arange(len(n)), (n - (n == draft.shape[1]).long()).clamp(min=0)
    _, right = right_rows(p, q, draft, u)
    wrong = pick(p[rows, last], u[:, 0])
    return n, wrong.where(n == draft.shape[1], right)


def no_token_after_all(p, q, draft, u):
    n, token = right_rows(p, q, draft, u)
    return n, token.masked_fill(n == draft.shape[1], -1)


def always_the_last_place(p, q, draft, u):
    n, _ = right_rows(p, q, draft, u)
    return n, pick(p[:, -1], u[:, 0])


def most_likely_of_the_rest(p, q, draft, u):
    n, _ = right_rows(p, q, draft, u)
    full = torch.cat((q.where(draft[..., None] >= 0, 0), torch.zeros_like(p[:, :1])), 1)
    return n, (p - full)[torch.arange(len(n)), n].argmax(-1)


def the_new_token_is_counted(p, q, draft, u):
    n, token = right_rows(p, q, draft, u)
    return n + 1, token


def shortest_row_for_all(p, q, draft, u):
    n, token = right_rows(p, q, draft, u)
    return n.min().expand_as(n).clone(), token


def all_or_nothing(p, q, draft, u):
    n, token = right_rows(p, q, draft, u)
    length = (draft >= 0).sum(1)
    return n * (n == length), token


def rejected_draft_repeated(p, q, draft, u):
    n, token = right_rows(p, q, draft, u)
    more = torch.cat((draft, draft.new_full((len(n), 1), -1)), 1)
    said = more[torch.arange(len(n)), n]
    return n, token.where(said < 0, said)


def writes_into_q(p, q, draft, u):
    q[draft < 0] = 0
    return right_rows(p, q, draft, u)


def needs_a_draft(p, q, draft, u):
    n = (draft >= 0).long().argmin(1)
    assert n.shape == draft[:, 0].shape
    return right_rows(p, q, draft, u)


ANSWERS = {
    equal_accepts: "a draft with p(x) = 0 is accepted at u = 0",
    q_forgotten: "accepted with probability p(x), q left out",
    quotient_upside_down: "the quotient turned round: q(x) / p(x)",
    accepted_if_p_is_larger: "only drafts that p prefers are accepted, without a coin",
    accepted_if_most_likely: "",
    drawn_from_p: "the replacement is drawn from p",
    drawn_from_p_without_the_draft: "the replacement is drawn from p without the rejected token",
    drawn_from_q: "the replacement is drawn from q",
    absolute_difference: "the replacement is drawn from |p - q|",
    difference_upside_down: "the replacement is drawn from max(0, q - p)",
    nothing_left_over: "no help where nothing is left over",
    all_that_are_accepted: "accepted drafts after a rejected one are counted",
    judged_by_u_of_its_place: "the last number of u draws the token, the others judge",
    one_number_for_all: "the number that draws the token also judges the drafts",
    padding_is_the_last_token: "",
    padding_is_token_zero: "-1 is taken for token 0, and its q is subtracted",
    padding_subtracts_q: "q is subtracted where there is no draft",
    bonus_from_the_last_draft: "after full acceptance the token is drawn from p at the last draft",
    no_token_after_all: "",
    always_the_last_place: "the last place gives the token, wherever the first rejection is",
    most_likely_of_the_rest: "the likeliest token in the place of a draw",
    the_new_token_is_counted: "the number of the first rejected draft counts from 1",
    shortest_row_for_all: "",
    all_or_nothing: "",
    rejected_draft_repeated: "a rejected draft is the token all the same",
    writes_into_q: "",
    needs_a_draft: "K of at least 1 is taken for granted",
}
RIGHT = [right_rows, right_at_all_places]
SILENT = [all_that_are_accepted, needs_a_draft]
