# %% [markdown]
# # A layer of experts
#
# A layer has E small MLPs, the experts. A router scores all of them for each token, the k best are
# computed, and their results are added up by weight. An expert $e$ is
# $W_e^{down}\,(\mathrm{silu}(W_e^{gate} x) \odot W_e^{up} x)$.
#
# What holds for your function:
#
# - `x` has shape `(N, C)`: one row for each token. `router` has `(E, C)`: a token's scores are the dot
#   products with its rows. No two scores of a token are equal.
# - `gate_up` has `(E, 2 * F, C)`: of each expert first the F rows of its gate, then the F rows of its
#   up. `down` has `(E, C, F)`. C, F and E may all differ.
# - The probabilities of a token are the softmax of *all* its scores. The k experts with the highest are
#   chosen, and weighed by their probabilities. If `normalize` is true, the k weights are divided by
#   their sum.
# - **No expert meets a token that did not choose it.** In one case, weights of experts that no token
#   chooses are NaN, and the result has none.
# - The result is `(N, C)`. N may be 1. In float64 nothing is rounded to float32; there is no half
#   precision.
# - The inputs may have any order in memory. They stay as they are, and gradients reach all four.

# %%
import torch
import torch.nn.functional as F
from torch import Tensor


# %%
def moe_layer(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    k: int,
    normalize: bool,
) -> Tensor:
    """The weighted sum of what the k best experts of each token say: (N, C)."""
    ### BEGIN SOLUTION
    probabilities = (x @ router.T).softmax(1)
    weights, experts = probabilities.topk(k)
    if normalize:
        weights = weights / weights.sum(1, keepdim=True)
    y = torch.zeros_like(x)
    for e in range(len(down)):
        token, place = (experts == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[e].T).chunk(2, 1)
        said = (F.silu(gate) * up) @ down[e].T
        y = y.index_add(0, token, said * weights[token, place, None])
    return y
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("moe_layer", moe_layer)
### BEGIN HIDDEN TESTS
points = min(points, check("moe_layer", moe_layer, seed=7341))
### END HIDDEN TESTS
float(points)
