# %% [markdown]
# # Measure: which of two models is better
#
# Two models have read the same texts. One has lost 4.1 nats at each token, the other 3.3. **Which one is better?** You
# cannot say: they cut the text into different tokens, and a model with longer tokens has more to guess at each. What
# both have in common is the text. So count what a model loses in all, and divide by the size of the text.
#
# What holds for your function:
#
# - `losses` has an entry for each model: its name, and a list with a tensor for each text. A tensor holds the loss of
#   each token of that text, in nats, in float16, bfloat16 or float32: finite numbers of any size, or NaN. It may be
#   empty; so may be the text, with a loss or without one.
# - `texts` is the list of these texts. At least one is not empty.
# - The size of a text is the number of its bytes in UTF-8: `é` has two, `你` three.
# - The result is a pair: the name of the model with the fewest *bits per byte* over all texts together, and that number,
#   a `float`. A bit is $\ln 2$ nats.
# - Sums are computed in float64. Of equal models the first one is taken. A model whose losses contain a NaN is never the
#   best, and one of the models has none.
#
# By hand: a model loses 2 and 3 nats at the two tokens of `né`, which has three bytes. That is
# $5 / (3 \ln 2) = 2.40$ bits per byte.

# %%
import math

from torch import Tensor


# %%
def best_model(
    losses: dict[str, list[Tensor]], texts: list[str]
) -> tuple[str, float]:
    """The model with the fewest bits per byte, and how many it needs."""
    ### BEGIN SOLUTION
    size = sum(len(text.encode()) for text in texts)
    bits = {}
    for name, tensors in losses.items():
        nats = sum(float(tensor.double().sum()) for tensor in tensors)
        if not math.isnan(nats):
            bits[name] = nats / math.log(2) / size
    best = min(bits, key=bits.__getitem__)
    return best, bits[best]
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("measure_loss", best_model)
### BEGIN HIDDEN TESTS
points = min(points, check("measure_loss", best_model, seed=7341))
### END HIDDEN TESTS
float(points)
