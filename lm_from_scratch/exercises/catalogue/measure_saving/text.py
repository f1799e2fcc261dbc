# %% [markdown]
# # Measure: what a cache saves
#
# A model writes `new` tokens after a prompt. Without a cache it reads the whole text again for each of them; with one it
# reads the prompt once, and then one token at a time. **How many multiplications is that?** Predict both numbers for any
# model; the check builds the model, runs it both ways, and counts.
#
# The model is Qwen2. What is multiplied, in a pass over $T$ tokens which see $S$ keys:
#
# | part | matrix or product |
# |---|---|
# | queries | width to `heads` · `head_dim`, for each of the $T$ tokens |
# | keys, and values | width to `kv_heads` · `head_dim` each, for each of the $T$ tokens |
# | scores, and the mean of values | for each head and each of $T \cdot S$ pairs, `head_dim` each; hidden pairs too |
# | output | `heads` · `head_dim` to width, for each of the $T$ tokens |
# | MLP | three matrices between width and `mlp`, for each of the $T$ tokens |
# | head | width to `vocab`, **for the last token alone** |
#
# All but the head is in every one of `layers` layers. Norms, rotation, softmax and the look-up of embeddings are left
# out: they are small, and no matrices.
#
# What holds for your function:
#
# - All arguments are whole numbers. `prompt` is at least 1, `new` at least 0. `heads` · `head_dim` need not be `width`.
# - The result is a pair of `int`: without a cache, and with one. A multiplication and its addition count as one.
# - The last token that is written is not read any more.
#
# By hand, with all sizes of the model 1: a pass of a token that sees itself has 1 + 2 + 2 + 1 + 3 + 1 = 10. After a
# prompt of one token, two tokens take 10 + 20 without a cache (the second pass has two tokens and four pairs) and
# 10 + 12 with one (one token, two keys).


# %%
def multiplications(
    prompt: int,
    new: int,
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mlp: int,
    vocab: int,
) -> tuple[int, int]:
    """Multiplications for `new` tokens after a prompt: without a cache, and with one."""
    ### BEGIN SOLUTION
    narrow = 2 * width * kv_heads * head_dim
    weights = 2 * width * heads * head_dim + narrow + 3 * width * mlp

    def one_pass(T: int, S: int) -> int:
        pairs = 2 * heads * head_dim * T * S
        return layers * (T * weights + pairs) + width * vocab

    lengths = range(prompt, prompt + new)
    without = sum(one_pass(end, end) for end in lengths)
    cached = sum(one_pass(1 if end > prompt else end, end) for end in lengths)
    return without, cached
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("measure_saving", multiplications)
### BEGIN HIDDEN TESTS
points = min(points, check("measure_saving", multiplications, seed=7341))
### END HIDDEN TESTS
float(points)
