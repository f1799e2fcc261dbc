"""Answers to hunt_cached_generation that were written from its text alone."""

import math

import torch


def right_with_new_tokens_only(model, prompt, n, chunk):
    return generate(model, prompt, n, chunk)


def right_with_a_mask_by_positions(model, prompt, n, chunk):
    T = prompt.shape[1]
    keys, values, out = [], [], []
    fed, piece = 0, prompt[:, :chunk]
    while True:
        S = fed + piece.shape[1]
        at = torch.arange(fed, S)
        x = model.embed(piece, at)
        q, k, v = model.qkv(x)
        keys.append(k)
        values.append(v)
        k, v = torch.cat(keys, 1), torch.cat(values, 1)
        scores = torch.einsum("btc,bsc->bts", q, k) / q.shape[-1] ** 0.5
        scores = scores + torch.where(torch.arange(S) > at[:, None], -torch.inf, 0.0)
        out.append(model.logits(x + torch.softmax(scores, -1) @ v))
        fed = S
        if fed == T + n - 1:
            return torch.cat(out, 1)
        piece = prompt[:, fed : fed + chunk] if fed < T else out[-1][:, -1].argmax(-1)[:, None]


def generate(
    model,
    prompt,
    n,
    chunk,
    positions=lambda old, T: torch.arange(old, old + T),
    mask=lambda old, T: torch.ones(old + T, old + T).tril()[old:],
    choose=lambda logits: logits[:, -1:].argmax(-1),
    rounds=0,
    keep=lambda k, v: (k, v),
    order=lambda old, new: [old, new],
):
    pieces, held, logits, old = list(prompt.split(chunk, 1)), None, [], 0
    for i in range(len(pieces) + n - 1 + rounds):
        ids = pieces[i] if i < len(pieces) else choose(logits[-1])
        T = ids.shape[1]
        x = model.embed(ids, positions(old, T))
        q, k, v = model.qkv(x)
        if held is not None:
            k = torch.cat(order(held[0], k), 1)
            v = torch.cat(order(held[1], v), 1)
        held = keep(k, v)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(mask(old, T) == 0, -math.inf)
        logits.append(model.logits(x + scores.softmax(-1) @ v))
        old += T
    return torch.cat(logits, 1)


def positions_from_zero(model, prompt, n, chunk):
    return generate(model, prompt, n, chunk, positions=lambda old, T: torch.arange(T))


def position_one_too_high(model, prompt, n, chunk):
    return generate(
        model, prompt, n, chunk, positions=lambda old, T: torch.arange(old, old + T) + (old > 0)
    )


def mask_from_the_corner(model, prompt, n, chunk):
    return generate(model, prompt, n, chunk, mask=lambda old, T: torch.ones(T, old + T).tril())


def no_mask_after_the_first_piece(model, prompt, n, chunk):
    def mask(old, T):
        return torch.ones(T, old + T) if old else torch.ones(T, T).tril()

    return generate(model, prompt, n, chunk, mask=mask)


def no_mask_at_all(model, prompt, n, chunk):
    return generate(model, prompt, n, chunk, mask=lambda old, T: torch.ones(T, old + T))


def old_keys_hidden(model, prompt, n, chunk):
    def mask(old, T):
        return torch.cat([torch.zeros(T, old), torch.ones(T, T).tril()], 1)

    return generate(model, prompt, n, chunk, mask=mask)


def itself_hidden_after_the_first_piece(model, prompt, n, chunk):
    def mask(old, T):
        return torch.ones(T, old + T).tril(old - 1 if old else 0)

    return generate(model, prompt, n, chunk, mask=mask)


def token_of_the_first_row_for_all(model, prompt, n, chunk):
    def choose(logits):
        return logits[:1, -1:].argmax(-1).expand(logits.shape[0], 1)

    return generate(model, prompt, n, chunk, choose=choose)


def token_of_the_first_position(model, prompt, n, chunk):
    return generate(model, prompt, n, chunk, choose=lambda x: x[:, :1].argmax(-1))


def one_round_more(model, prompt, n, chunk):
    return generate(model, prompt, n, chunk, rounds=1)


def one_round_less(model, prompt, n, chunk):
    return generate(model, prompt, n, chunk, rounds=-1)


def new_keys_in_front(model, prompt, n, chunk):
    return generate(model, prompt, n, chunk, order=lambda old, new: [new, old])


def prompt_in_one_piece(model, prompt, n, chunk):
    return generate(model, prompt, n, prompt.shape[1])


def no_cache_at_all(model, prompt, n, chunk):
    ids, logits = prompt, None
    while True:
        T = ids.shape[1]
        x = model.embed(ids, torch.arange(T))
        q, k, v = model.qkv(x)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -math.inf)
        logits = model.logits(x + scores.softmax(-1) @ v)
        if prompt.shape[1] + n - 1 == T:
            return logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)


def only_the_last_logits(model, prompt, n, chunk):
    return generate(model, prompt, n, chunk)[:, -n:]


def keys_of_generated_tokens_not_held(model, prompt, n, chunk):
    T = prompt.shape[1]

    def mask(old, size):
        S = min(old, T) + size
        return torch.ones(size, S).tril(S - size)

    return generate(model, prompt, n, chunk, keep=lambda k, v: (k[:, :T], v[:, :T]), mask=mask)


def cut_to_new_tokens_after_the_layer(model, prompt, n, chunk):
    """The whole text is read again; only the new keys are added."""
    pieces, ids, held, logits = list(prompt.split(chunk, 1)), prompt[:, :0], None, []
    for i in range(len(pieces) + n - 1):
        new = pieces[i] if i < len(pieces) else logits[-1][:, -1:].argmax(-1)
        ids = torch.cat([ids, new], 1)
        T = ids.shape[1]
        x = model.embed(ids, torch.arange(T))[:, -new.shape[1] :]
        q, k, v = model.qkv(x)
        held = (k, v) if held is None else (torch.cat([held[0], k], 1), torch.cat([held[1], v], 1))
        scores = q @ held[0].mT / math.sqrt(q.shape[-1])
        mask = torch.ones(T, T).tril()[-new.shape[1] :]
        x = x + scores.masked_fill(mask == 0, -math.inf).softmax(-1) @ held[1]
        logits.append(model.logits(x))
    return torch.cat(logits, 1)


def likeliest_of_the_whole_batch(model, prompt, n, chunk):
    def choose(logits):
        return logits[:, -1:].mean(0, keepdim=True).argmax(-1).expand(logits.shape[0], 1)

    return generate(model, prompt, n, chunk, choose=choose)


def prompt_used_as_the_buffer(model, prompt, n, chunk):
    out = generate(model, prompt, n, chunk)
    prompt[:, -1:] = out[:, -1:].argmax(-1)
    return out


ANSWERS = {
    positions_from_zero: "the positions of every round start at 0",
    position_one_too_high: "positions go on one too far after the prompt",
    mask_from_the_corner: "the first rows of the triangle are taken, not the last",
    no_mask_after_the_first_piece: "nothing is hidden once there is a past",
    no_mask_at_all: "nothing is hidden at all",
    old_keys_hidden: "",
    itself_hidden_after_the_first_piece: "a query sees one key too few",
    token_of_the_first_row_for_all: "",
    token_of_the_first_position: "the next token is chosen by the first new logits, not the last",
    one_round_more: "",
    one_round_less: "",
    new_keys_in_front: "",
    prompt_in_one_piece: "",
    no_cache_at_all: "the whole text is read again in every round, as without a cache",
    only_the_last_logits: "",
    keys_of_generated_tokens_not_held: "",
    cut_to_new_tokens_after_the_layer: (
        "the whole text is read again in every round, as without a cache"
    ),
    likeliest_of_the_whole_batch: "",
    prompt_used_as_the_buffer: "",
}
RIGHT = [right_with_new_tokens_only, right_with_a_mask_by_positions]
