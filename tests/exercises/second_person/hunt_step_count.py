"""Answers to hunt_step_count that were written from its text alone."""

import torch


def refuse_sparse(grads):
    if any(g is not None and g.is_sparse for g in grads):
        raise ValueError("sparse")


def move(p, g, own, lr, betas, eps, decay):
    own["t"] += 1
    own["m"] = betas[0] * own["m"] + (1 - betas[0]) * g
    own["v"] = betas[1] * own["v"] + (1 - betas[1]) * g * g
    m = own["m"] / (1 - betas[0] ** own["t"])
    v = own["v"] / (1 - betas[1] ** own["t"])
    p.mul_(1 - lr * decay)
    p.sub_(lr * m / (v.sqrt() + eps))


def new(p):
    return {"t": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}


def right_checked_first(params, grads, state, lr, betas, eps, weight_decay):
    refuse_sparse(grads)
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        if g is not None:
            move(p, g, state.setdefault(i, new(p)), lr, betas, eps, weight_decay)


def right_with_a_list_of_counts(params, grads, state, lr, betas, eps, weight_decay):
    for g in grads:
        if g is not None and g.is_sparse:
            raise ValueError("no sparse gradients")
    counts = state.setdefault("counts", [0] * len(params))
    for i, g in enumerate(grads):
        if g is None:
            continue
        counts[i] += 1
        own = state.setdefault(i, new(params[i]))
        own["t"] = counts[i] - 1
        move(params[i], g, own, lr, betas, eps, weight_decay)


def counter_still_shared(params, grads, state, lr, betas, eps, weight_decay):
    refuse_sparse(grads)
    state["t"] = state.get("t", 0) + 1
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        if g is not None:
            own = state.setdefault(i, new(p))
            own["t"] = state["t"] - 1
            move(p, g, own, lr, betas, eps, weight_decay)


def sparse_found_on_the_way(params, grads, state, lr, betas, eps, weight_decay):
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        if g is None:
            continue
        if g.is_sparse:
            raise ValueError("sparse")
        move(p, g, state.setdefault(i, new(p)), lr, betas, eps, weight_decay)


def counts_calls_since_the_first_gradient(params, grads, state, lr, betas, eps, weight_decay):
    refuse_sparse(grads)
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        if i in state and g is None:
            state[i]["t"] += 1
        elif g is not None:
            move(p, g, state.setdefault(i, new(p)), lr, betas, eps, weight_decay)


def counted_before_the_refusal(params, grads, state, lr, betas, eps, weight_decay):
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        if g is not None:
            state.setdefault(i, new(p))["t"] += 1
    refuse_sparse(grads)
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        if g is not None:
            state[i]["t"] -= 1
            move(p, g, state[i], lr, betas, eps, weight_decay)


def sparse_gradients_skipped(params, grads, state, lr, betas, eps, weight_decay):
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        if g is not None and not g.is_sparse:
            move(p, g, state.setdefault(i, new(p)), lr, betas, eps, weight_decay)


def sparse_made_dense(params, grads, state, lr, betas, eps, weight_decay):
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        if g is not None:
            g = g.to_dense() if g.is_sparse else g
            move(p, g, state.setdefault(i, new(p)), lr, betas, eps, weight_decay)


def nothing_done_where_one_gradient_is_missing(params, grads, state, lr, betas, eps, weight_decay):
    if any(g is None for g in grads):
        return
    right_checked_first(params, grads, state, lr, betas, eps, weight_decay)


def missing_gradient_taken_as_zero(params, grads, state, lr, betas, eps, weight_decay):
    refuse_sparse(grads)
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        g = torch.zeros_like(p) if g is None else g
        move(p, g, state.setdefault(i, new(p)), lr, betas, eps, weight_decay)


def decay_without_a_gradient(params, grads, state, lr, betas, eps, weight_decay):
    refuse_sparse(grads)
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        if g is None:
            p.mul_(1 - lr * weight_decay)
        else:
            move(p, g, state.setdefault(i, new(p)), lr, betas, eps, weight_decay)


def state_by_position_among_the_present(params, grads, state, lr, betas, eps, weight_decay):
    refuse_sparse(grads)
    present = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
    for i, (p, g) in enumerate(present):
        own = state.setdefault(i, new(p))
        if own["m"].shape != p.shape:
            own = state[i] = new(p)
        move(p, g, own, lr, betas, eps, weight_decay)


def rebound_instead_of_changed(params, grads, state, lr, betas, eps, weight_decay):
    refuse_sparse(grads)
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        if g is not None:
            q = p.clone()
            move(q, g, state.setdefault(i, new(p)), lr, betas, eps, weight_decay)
            params[i] = q


def moments_kept_in_float32(params, grads, state, lr, betas, eps, weight_decay):
    refuse_sparse(grads)
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        if g is not None:
            own = state.setdefault(i, new(p.float()))
            move(p, g.float(), own, lr, betas, eps, weight_decay)


def first_gradient_sparse_only(params, grads, state, lr, betas, eps, weight_decay):
    if grads[0] is not None and grads[0].is_sparse:
        raise ValueError("sparse")
    sparse_found_on_the_way(params, grads, state, lr, betas, eps, weight_decay)


ANSWERS = {
    counter_still_shared: "the refusal is repaired, the count is still that of the group",
    sparse_found_on_the_way: "the count is repaired, a sparse gradient is still found half way",
    counts_calls_since_the_first_gradient: (
        "the count is that of the group, less the steps before the first gradient"
    ),
    counted_before_the_refusal: "the counts are raised before the refusal",
    sparse_gradients_skipped: "a sparse gradient is passed over, the others are used",
    sparse_made_dense: "a sparse gradient is made dense and used",
    nothing_done_where_one_gradient_is_missing: "",
    missing_gradient_taken_as_zero: "a missing gradient is taken for zeros",
    decay_without_a_gradient: "a parameter without a gradient decays",
    state_by_position_among_the_present: "",
    rebound_instead_of_changed: "a new tensor in the list, in the place of the parameter",
    moments_kept_in_float32: "",
    first_gradient_sparse_only: "the count is repaired, a sparse gradient is still found half way",
}
RIGHT = [right_checked_first, right_with_a_list_of_counts]
