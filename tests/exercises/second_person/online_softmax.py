"""Answers to online_softmax, written from its text by a second person."""

import torch

INF = float("inf")


def tiles(q, k, v, visible, tile):
    for i in range(0, k.shape[0], tile):
        s = q.float() @ k[i : i + tile].float().T * q.shape[1] ** -0.5
        yield s, v[i : i + tile].float(), visible[:, i : i + tile]


def start(q):
    T, D = q.shape
    return torch.full((T, 1), -INF), torch.zeros(T, 1), torch.zeros(T, D)


def log_sum_exp(q, k, v, visible, tile):
    """Right: keeps the mean and the logarithm of the sum."""
    total, mean = torch.full((q.shape[0], 1), -INF), torch.zeros(q.shape)
    for s, values, seen in tiles(q, k, v, visible, tile):
        s = torch.where(seen, s, -INF)
        own = s.logsumexp(1, keepdim=True)
        new = torch.logaddexp(total, own)
        base = torch.where(new == -INF, 0.0, new)
        mean = mean * (total - base).exp() + (s - base).exp() @ values
        total = new
    return mean.to(q.dtype)


def update(q, k, v, visible, tile, factor=None, largest=None):
    """Right with its defaults: the lines of the text."""
    m, total, out = start(q)
    for s, values, seen in tiles(q, k, v, visible, tile):
        s = s.masked_fill(~seen, -INF)
        new = torch.maximum(m, s.amax(1, keepdim=True))
        if largest:
            new = largest(m, s)
        base = new.masked_fill(new == -INF, 0)
        p = (s - base).exp()
        a, b = factor(m, base) if factor else ((m - base).exp(),) * 2
        total, out, m = total * a + p.sum(1, keepdim=True), out * b + p @ values, new
    return torch.where(total > 0, out / total, 0).to(q.dtype)


def never_put_right(q, k, v, visible, tile):
    return update(q, k, v, visible, tile, lambda m, new: (1.0, 1.0))


def only_the_sum_put_right(q, k, v, visible, tile):
    return update(q, k, v, visible, tile, lambda m, new: ((m - new).exp(), 1.0))


def only_the_values_put_right(q, k, v, visible, tile):
    return update(q, k, v, visible, tile, lambda m, new: (1.0, (m - new).exp()))


def factor_upside_down(q, k, v, visible, tile):
    def factor(m, new):
        f = torch.where(m == -INF, 0.0, (new - m).exp())
        return f, f

    return update(q, k, v, visible, tile, factor)


def maximum_of_the_tile_alone(q, k, v, visible, tile):
    return update(q, k, v, visible, tile, largest=lambda m, s: s.amax(1, keepdim=True))


def maximum_from_zero(q, k, v, visible, tile):
    return update(q, k, v, visible, tile,
                  largest=lambda m, s: torch.maximum(m, s.amax(1, keepdim=True)).clamp(min=0)
                  )  # fmt: skip


def one_maximum_for_all_queries(q, k, v, visible, tile):
    return update(q, k, v, visible, tile,
                  largest=lambda m, s: torch.maximum(m, s.max()).expand(len(s), 1).contiguous()
                  )  # fmt: skip


def hidden_tile_forgotten(q, k, v, visible, tile):
    m, total, out = start(q)
    for s, values, seen in tiles(q, k, v, visible, tile):
        s = s.masked_fill(~seen, -INF)
        new = torch.maximum(m, s.amax(1, keepdim=True))
        f, p = (m - new).exp(), (s - new).exp()
        total, out, m = f * total + p.sum(1, keepdim=True), f * out + p @ values, new
    return (out / total).to(q.dtype)


def nan_swept_away(q, k, v, visible, tile):
    return hidden_tile_forgotten(q, k, v, visible, tile).nan_to_num(0.0)


def blind_rows_divide_by_zero(q, k, v, visible, tile):
    m, total, out = start(q)
    m = m.clamp(min=-1e30)
    for s, values, seen in tiles(q, k, v, visible, tile):
        new = torch.maximum(m, s.masked_fill(~seen, -INF).amax(1, keepdim=True))
        p = torch.where(seen, (s - new).exp(), 0.0)
        f = (m - new).exp()
        total, out, m = f * total + p.sum(1, keepdim=True), f * out + p @ values, new
    return (out / total).to(q.dtype)


def hidden_with_a_large_number(q, k, v, visible, tile):
    m, total, out = start(q)
    for s, values, seen in tiles(q, k, v, visible, tile):
        s = s.masked_fill(~seen, -1e9)
        new = torch.maximum(m, s.amax(1, keepdim=True))
        f, p = (m - new).exp(), (s - new).exp()
        total, out, m = f * total + p.sum(1, keepdim=True), f * out + p @ values, new
    return (out / total).to(q.dtype)


def maximum_before_the_mask(q, k, v, visible, tile):
    m, total, out = start(q)
    for s, values, seen in tiles(q, k, v, visible, tile):
        new = torch.maximum(m, s.amax(1, keepdim=True))
        f, p = (m - new).exp(), (s - new).exp() * seen
        total, out, m = f * total + p.sum(1, keepdim=True), f * out + p @ values, new
    return (out / total.clamp(min=1e-30)).to(q.dtype)


def rest_left_out(q, k, v, visible, tile):
    n = k.shape[0] // tile * tile
    return update(q, k[:n], v[:n], visible[:, :n], tile)


def softmax_of_each_tile(q, k, v, visible, tile):
    parts = []
    for s, values, seen in tiles(q, k, v, visible, tile):
        parts.append(s.masked_fill(~seen, -INF).softmax(1).nan_to_num(0) @ values)
    return torch.stack(parts).mean(0).to(q.dtype)


def all_scores_at_once(q, k, v, visible, tile):
    s = (q.float() @ k.float().T / q.shape[1] ** 0.5).masked_fill(~visible, -INF)
    return (s.softmax(-1).nan_to_num(0) @ v.float()).to(q.dtype)


def tiles_put_together_again(q, k, v, visible, tile):
    s = torch.cat([s.masked_fill(~seen, -INF) for s, _, seen in tiles(q, k, v, visible, tile)], 1)
    return (s.softmax(-1).nan_to_num(0) @ v.float()).to(q.dtype)


def no_root_of_d(q, k, v, visible, tile):
    return update(q * q.shape[1] ** 0.5, k, v, visible, tile)


def scores_in_half(q, k, v, visible, tile):
    m, total, out = start(q)
    for i in range(0, k.shape[0], tile):
        s = (q @ k[i : i + tile].T / q.shape[1] ** 0.5).float()
        s = s.masked_fill(~visible[:, i : i + tile], -INF)
        new = torch.maximum(m, s.amax(1, keepdim=True))
        base = torch.where(new == -INF, 0, new)
        f, p = (m - base).exp(), (s - base).exp()
        total = total * f + p.sum(1, keepdim=True)
        out, m = out * f + p @ v[i : i + tile].float(), new
    return torch.where(total > 0, out / total, 0).to(q.dtype)


def normalised_in_every_tile(q, k, v, visible, tile):
    m, total, out = start(q)
    for s, values, seen in tiles(q, k, v, visible, tile):
        s = s.masked_fill(~seen, -INF)
        new = torch.maximum(m, s.amax(1, keepdim=True))
        base = torch.where(new == -INF, 0, new)
        f, p = (m - base).exp(), (s - base).exp()
        total = total * f + p.sum(1, keepdim=True)
        out = torch.where(total > 0, (out * f + p @ values) / total, 0)
        m = new
    return out.to(q.dtype)


def sums_in_half(q, k, v, visible, tile):
    m, total, out = start(q)
    total, out = total.to(q.dtype), out.to(q.dtype)
    for s, values, seen in tiles(q, k, v, visible, tile):
        s = s.masked_fill(~seen, -INF)
        new = torch.maximum(m, s.amax(1, keepdim=True))
        base = torch.where(new == -INF, 0, new)
        f, p = (m - base).exp().to(q.dtype), (s - base).exp().to(q.dtype)
        total, out, m = total * f + p.sum(1, keepdim=True), out * f + p @ values.to(q.dtype), new
    return torch.where(total > 0, out / total, 0)


ANSWERS = {
    never_put_right: "nothing is repaired when the maximum rises",
    only_the_sum_put_right: "the weighted values are not repaired when the maximum rises",
    only_the_values_put_right: "the sum is not repaired when the maximum rises",
    factor_upside_down: "the factor is turned round: exp(new maximum - old maximum)",
    maximum_of_the_tile_alone: "the maximum of the tile, not of all tiles so far",
    maximum_from_zero: "the maximum starts at 0",
    one_maximum_for_all_queries: "one maximum for all queries, far above some of them",
    hidden_tile_forgotten: "the maximum starts at minus infinity",
    nan_swept_away: "the maximum starts at minus infinity, and NaN is made 0 at the end",
    blind_rows_divide_by_zero: "0 / 0 in a row without a key",
    hidden_with_a_large_number: (
        "hidden scores are a finite number, so that a row without a key is a mean"
    ),
    maximum_before_the_mask: "hidden keys count for the maximum",
    rest_left_out: "the shorter last tile is left out",
    softmax_of_each_tile: "a softmax in each tile, and the mean of the tiles",
    all_scores_at_once: "all scores exist at once",
    tiles_put_together_again: "all scores exist at once",
    no_root_of_d: "the root of D is missing",
    scores_in_half: "the scores are rounded to half precision",
    normalised_in_every_tile: "divided by the sum in every tile, and the quotient added to",
    sums_in_half: "the sums are kept in half precision",
}
RIGHT = [log_sum_exp, update]
SILENT = [maximum_of_the_tile_alone, hidden_tile_forgotten, blind_rows_divide_by_zero]
