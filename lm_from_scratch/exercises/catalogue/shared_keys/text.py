# %% [markdown]
# # Keys shared across layers
#
# The last layers of Gemma 4 have no keys and values of their own. Each reads those of an earlier layer:
# of the *last* layer of its kind that has some. Here are eight layers, of which the last four share. Layers
# that slide are marked S, layers that see everything F:
#
# | layer | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
# |---|---|---|---|---|---|---|---|---|
# | kind | S | S | F | S | S | F | S | F |
# | reads the keys of | 0 | 1 | 2 | 3 | **3** | **2** | **3** | **2** |
#
# Write a function that says which layer's keys each layer reads, and how many numbers the cache holds.
# What holds for your function:
#
# - `kinds` has a word for each layer, `"sliding_attention"` or `"full_attention"`, in any order.
# - The last `shared` layers share. `shared` may be 0, and is less than the number of layers. Each kind is there at
#   least once among the layers that do not share.
# - `numbers` says for each kind how many numbers a layer of that kind keeps of a token, keys and values together.
# - The cache has read `tokens` tokens. A layer that sees everything keeps all of them. A layer that slides
#   keeps the latest `window`, and the text may be shorter than that.
# - The result is a list of layers, one for each layer, and a whole number: what all layers keep together.
# - The arguments stay as they are.

# %%
SLIDING = "sliding_attention"


# %%
def shared_keys(
    kinds: list[str],
    shared: int,
    numbers: dict[str, int],
    tokens: int,
    window: int,
) -> tuple[list[int], int]:
    """The layer whose keys each layer reads, and the numbers in the cache."""
    ### BEGIN SOLUTION
    first = len(kinds) - shared
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    reads = [*range(first)] + [last[kind] for kind in kinds[first:]]
    kept = 0
    for kind in kinds[:first]:
        length = min(tokens, window) if kind == SLIDING else tokens
        kept += numbers[kind] * length
    return reads, kept
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("shared_keys", shared_keys)
### BEGIN HIDDEN TESTS
points = min(points, check("shared_keys", shared_keys, seed=7341))
### END HIDDEN TESTS
float(points)
