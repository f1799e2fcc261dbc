# %% [markdown]
# # Measure: how long a text fits
#
# You have a model, a machine, and so many bytes left for the cache. **How many tokens may a text have?** People ask
# this before they rent a GPU, and the answer decides what a server can promise.
#
# Models of today mix layers that remember in different ways. What a layer keeps of one text is said by a tuple:
#
# | layer | what it keeps |
# |---|---|
# | `("full", heads, width)` | of every token, a key and a value for each head |
# | `("sliding", heads, width, window)` | the same, for a window of tokens |
# | `("latent", width)` | of every token, one vector that keys and values of all heads are made of |
# | `("state", numbers)` | a state, which does not grow |
#
# What holds for your function:
#
# - `layers` is a list of such tuples, one for each layer, with at least one in it. `heads` are heads of keys: query heads
#   are not kept.
# - `budget` is the number of bytes. `rows` texts are held at the same time, all equally long. Each has a cache of its
#   own. A number takes `number` bytes: 2 in bfloat16, which is the default.
# - Room for a window and for a state is made before the first token comes, and stays as large as it is.
# - The result is the largest number of tokens that each text may have, an `int`. It is 0 if not even the room that is
#   made at the start fits, or if one token is too many. It is `None` if no text is too long.
#
# By hand: two full layers with 3 heads of width 4 in bfloat16 keep $2 \cdot 2 \cdot 3 \cdot 4 \cdot 2 = 96$ bytes of a
# token. A thousand bytes hold ten tokens, and 40 bytes are left over.


# %%
def longest_text(
    layers: list[tuple], budget: int, rows: int = 1, number: int = 2
) -> int | None:
    """The largest number of tokens whose cache fits into so many bytes."""
    ### BEGIN SOLUTION
    fixed = growing = 0
    for kind, *sizes in layers:
        if kind == "full":
            heads, width = sizes
            growing += 2 * heads * width
        elif kind == "sliding":
            heads, width, window = sizes
            fixed += 2 * heads * width * window
        elif kind == "latent":
            growing += sizes[0]
        else:
            fixed += sizes[0]
    left = budget - rows * number * fixed
    if left < 0:
        return 0
    if growing == 0:
        return None
    return left // (rows * number * growing)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("measure_cache", longest_text)
### BEGIN HIDDEN TESTS
points = min(points, check("measure_cache", longest_text, seed=7341))
### END HIDDEN TESTS
float(points)
