# %% [markdown]
# # What would it say if it stopped here?
#
# A model turns its last state into words with a norm and a head. Every block only adds to the stream, so nothing
# forbids giving both of them an earlier state: that is the *logit lens*. Write it for the streams of a whole model.
#
# What holds for your function:
#
# - `states` has shape `(L + 1, B, T, C)`: the stream in front of each of the L blocks, and last the one behind them,
#   which is in front of the norm. No state has been through the norm.
# - The norm is RMSNorm, with `weight` `(C,)` and `eps`: a state is divided by
#   $\sqrt{\tfrac{1}{C} \sum_c x_c^2 + \epsilon}$ and multiplied by the weight. Each state has a norm of its own.
# - The head is a matrix `(V, C)` with a row for each word: a logit is the product of that row and the normed state.
# - The result is a pair: the probabilities of the `k` most probable words at each place and token, the largest first,
#   `(L + 1, B, T, k)`, and their ids, int64, of the same shape. The probabilities are those among all V words.
# - `k` is 3 by default, and never more than V.
# - States, weight and head have one dtype. For float16 and bfloat16 all is computed in float32, and the probabilities
#   are float32; for float32 and float64 nothing changes its dtype.
# - The arguments stay as they are.

# %%
import torch
from torch import Tensor


# %%
def lens_words(
    states: Tensor,
    weight: Tensor,
    eps: float,
    head: Tensor,
    k: int = 3,
) -> tuple[Tensor, Tensor]:
    """The k most probable words of every state, (L + 1, B, T, k), and their ids."""
    ### BEGIN SOLUTION
    work = torch.float64 if states.dtype == torch.float64 else torch.float32
    x = states.to(work)
    square = x.square().mean(dim=-1, keepdim=True)
    normed = x * torch.rsqrt(square + eps) * weight.to(work)
    logits = normed @ head.to(work).mT
    top = logits.softmax(dim=-1).topk(k, dim=-1)
    return top.values, top.indices
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("logit_lens", lens_words)
### BEGIN HIDDEN TESTS
points = min(points, check("logit_lens", lens_words, seed=7341))
### END HIDDEN TESTS
float(points)
