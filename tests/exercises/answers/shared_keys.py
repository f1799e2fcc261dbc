"""Other right answers to shared_keys."""


def by_search(kinds, shared, numbers, tokens, window):
    """From each layer that shares down to the first that fits."""
    first, reads = len(kinds) - shared, []
    for layer, kind in enumerate(kinds):
        while layer >= first or kinds[layer] != kind:
            layer -= 1
        reads.append(layer)
    sizes = [
        numbers[kind] * (tokens if kind.startswith("full") else min(window, tokens))
        for kind in kinds[: len(kinds) - shared]
    ]
    return reads, sum(sizes)


def by_maximum(kinds, shared, numbers, tokens, window):
    """The largest number of its kind among those with keys."""
    own = range(len(kinds) - shared)
    reads = [
        n if n in own else max(m for m in own if kinds[m] == kinds[n]) for n in range(len(kinds))
    ]
    kept = {"sliding_attention": sorted([tokens, window])[0], "full_attention": tokens}
    return reads, sum(kept[kinds[n]] * numbers[kinds[n]] for n in own)


def by_simulation(kinds, shared, numbers, tokens, window):
    """A cache is filled token by token, and its columns are counted."""
    reads, last, held = [], {}, {}
    for layer, kind in enumerate(kinds):
        if layer < len(kinds) - shared:
            last[kind], held[layer] = layer, []
        reads.append(last[kind])
    for token in range(tokens):
        for layer, column in held.items():
            column.append(token)
            if kinds[layer] == "sliding_attention" and len(column) > window:
                del column[0]
    return reads, sum(len(column) * numbers[kinds[layer]] for layer, column in held.items())


def by_counting(kinds, shared, numbers, tokens, window):
    """Layers of a kind times what one of them keeps."""
    own, others = kinds[: len(kinds) - shared], kinds[len(kinds) - shared :]
    reads = list(range(len(own)))
    reads.extend(len(own) - 1 - own[::-1].index(kind) for kind in others)
    total = 0
    for kind, width in numbers.items():
        total += own.count(kind) * width * (min(tokens, window) if "sliding" in kind else tokens)
    return reads, total


RIGHT = [by_search, by_maximum, by_simulation, by_counting]

LENGTH = "length = min(tokens, window) if kind == SLIDING else tokens"
SURVIVORS = {
    f"{LENGTH}: min(tokens, window) => min(window, tokens)": "the smaller of two, in either order"
}
