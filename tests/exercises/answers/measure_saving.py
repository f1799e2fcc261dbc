"""Other right answers to measure_saving."""


def by_passes(prompt, new, **n):
    """Pass by pass, part by part."""
    inner, narrow = n["heads"] * n["head_dim"], n["kv_heads"] * n["head_dim"]

    def cost(T, S):
        parts = [
            T * n["width"] * inner,
            T * n["width"] * narrow,
            T * n["width"] * narrow,
            T * S * inner,
            T * S * inner,
            T * inner * n["width"],
            *[T * n["width"] * n["mlp"]] * 3,
        ]
        return n["layers"] * sum(parts) + n["width"] * n["vocab"]

    slow = quick = 0
    for step in range(new):
        slow += cost(prompt + step, prompt + step)
        quick += cost(1, prompt + step) if step else cost(prompt, prompt)
    return slow, quick


def by_sums(prompt, new, **n):
    """The sums over all passes in closed form."""
    if new == 0:
        return 0, 0
    inner, last = n["heads"] * n["head_dim"], prompt + new - 1
    token = 2 * n["width"] * (inner + n["kv_heads"] * n["head_dim"]) + 3 * n["width"] * n["mlp"]
    head = new * n["width"] * n["vocab"]

    def first(k):
        return k * (k + 1) // 2

    def squares(k):
        return k * (k + 1) * (2 * k + 1) // 6

    read = first(last) - first(prompt - 1)
    pairs = squares(last) - squares(prompt - 1)
    later = first(last) - first(prompt)
    slow = n["layers"] * (token * read + 2 * inner * pairs) + head
    quick = n["layers"] * (token * last + 2 * inner * (prompt * prompt + later)) + head
    return slow, quick


def by_recursion(prompt, new, **n):
    """One token more, each time."""
    if new == 0:
        return 0, 0
    slow, quick = by_recursion(prompt, new - 1, **n)
    S = prompt + new - 1
    T = S if new == 1 else 1
    whole, rest = (by_passes(S, 1, **n)[0], by_passes(1, 1, **n)[0])
    pairs = 2 * n["layers"] * n["heads"] * n["head_dim"]
    return slow + whole, quick + (whole if T == S else rest + pairs * (S - 1))


def by_matrices(prompt, new, **n):
    """The matrices of a layer by their shapes, and the lengths of all passes as lists."""
    C, inner, narrow = n["width"], n["heads"] * n["head_dim"], n["kv_heads"] * n["head_dim"]
    shapes = [(C, inner), (C, narrow), (C, narrow), (inner, C), *[(C, n["mlp"])] * 3]
    token = sum(rows * columns for rows, columns in shapes)
    keys = [prompt + step for step in range(new)]

    def total(read):
        pairs = sum(T * S for T, S in zip(read, keys, strict=True))
        return n["layers"] * (token * sum(read) + 2 * inner * pairs) + new * C * n["vocab"]

    return total(keys), total([prompt, *[1] * (new - 1)][:new])


RIGHT = [by_passes, by_sums, by_recursion, by_matrices]

SURVIVORS = {
    "without = sum((one_pass(end, end) for end in lengths)): "
    "one_pass(end, end) => one_pass(end, end)": "both arguments are the same"
}
