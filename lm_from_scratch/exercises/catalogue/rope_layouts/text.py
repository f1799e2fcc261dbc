# %% [markdown]
# # Two layouts of pairs
#
# RoPE turns pairs of features. Some programs pair feature $i$ of a head with $i + D/2$
# (*half-split*: Qwen2 and Llama in transformers), others pair $2i$ with $2i + 1$
# (*interleaved*: the paper, Meta's Llama). A file of weights does not say which. Loaded into the
# wrong program every shape fits, and the model is wrong from the second token on.
#
# The layouts differ in the order of features only. The features of a query are made by the rows of
# a projection, so a checkpoint is converted by moving rows of the query and key projections. In
# each head, row $i$ goes to place $2i$ and row $D/2 + i$ to place $2i + 1$, for
# $i = 0 \dots D/2 - 1$. This permutation $P$ changes no score: $(Pq) \cdot (Pk) = q \cdot k$.
#
# Write the conversion from half-split to interleaved. What holds for your function:
#
# - `weight` is the weight of an `nn.Linear`, shape `(H*D, C)`: the D rows of the first head, then
#   those of the second, and so on. Or it is the bias of that layer, shape `(H*D,)`.
# - `n_head` is H, the number of *its* heads: 6 for the queries and 2 for the keys of one model.
# - The result has the shape and the dtype of `weight`, and the same numbers in other rows: heads
#   stay where they are, and no column moves.
# - `weight` stays as it is, and gradients reach it.
# - If the rows cannot be `n_head` heads of whole pairs, or if `n_head` is below 1, it raises
#   `ValueError`.
#
# One head of six rows becomes its rows 0, 3, 1, 4, 2, 5, in this order. (Do not test with heads of
# four: there both directions of the conversion are the same.)

# %%
import torch  # noqa: F401
from torch import Tensor


# %%
def interleave(weight: Tensor, n_head: int) -> Tensor:
    """Rows of a query or key projection (H*D, C), or its bias, from half-split to interleaved."""
    ### BEGIN SOLUTION
    rows = weight.shape[0]
    if n_head < 1 or rows % (2 * n_head) != 0:
        raise ValueError(f"{rows} rows cannot be {n_head} heads of whole pairs")
    heads = weight.unflatten(0, (n_head, 2, -1))  # (H, half, D/2, C)
    return heads.transpose(1, 2).flatten(0, 2)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("rope_layouts", interleave)
### BEGIN HIDDEN TESTS
points = min(points, check("rope_layouts", interleave, seed=7341))
### END HIDDEN TESTS
float(points)
