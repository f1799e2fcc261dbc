# %% [markdown]
# # Measure: which theta reads a longer text
#
# A model with RoPE was trained on short texts, and you want it to read longer ones. A fast pair of features has turned
# all the way round in training: there is no angle that it does not know. A slow pair has not, and at a larger distance
# it comes to angles that the model has never seen. A larger $\theta$ slows it down, but the smaller $\theta$ is, the
# better are neighbours told apart. **Which $\theta$ of a list do you take?** The check turns vectors from position to
# position and adds up their angles.
#
# Pair $i$ of a head with $D$ features, $i = 0 \dots D/2 - 1$, turns by $\omega_i = \theta^{-2i/D}$ per position.
# Positions begin at 0, so the largest distance in a text of $n$ tokens is $n - 1$.
#
# - A pair is *known all round* if its angle at the largest distance in training, with the old $\theta$, is $2\pi$ or more.
# - Any other pair knows the angles up to the one at that distance. What is larger is new to it.
# - A $\theta$ is *safe* if no pair comes to a new angle within the text to read. Angles are those of the whole way: the
#   second turn counts from $2\pi$ on.
#
# What holds for your function:
#
# - `thetas` is a list of numbers to choose from, all above 1, in any order. `head_dim` is $D$, even and at least 4.
# - `trained` is how many tokens a text in training had, `length` is that of the text to read. Both are at least 2, and
#   not equal; either may be the larger one.
# - `theta` is the one of training, 10000 if the caller does not give it.
# - The result is a pair: how many pairs are not known all round, and the smallest safe $\theta$ of the list, or `None` if
#   there is none.
# - No angle that decides lies within 1 % of its border.
#
# By hand: $D = 4$ and $\theta = 100$ give the speeds 1 and 0.1. With 41 tokens in training the angles are 40 and 4: the
# second pair is not known all round. A text of 81 tokens needs $80\,\omega_1 \le 4$, so $\omega_1 \le 1/20$ and
# $\theta \ge 400$. Of 1000, 300 and 500 the answer takes 500: `(1, 500)`.

# %%
import math


# %%
def safe_theta(
    thetas: list[float],
    head_dim: int,
    trained: int,
    length: int,
    theta: float = 10000.0,
) -> tuple[int, float | None]:
    """How many pairs are not known all round, and the smallest safe theta."""
    ### BEGIN SOLUTION
    half = head_dim // 2
    known = [(trained - 1) * theta ** (-i / half) for i in range(half)]
    slow = [i for i in range(half) if known[i] < 2 * math.pi]
    safe = []
    for new in thetas:
        largest = [(length - 1) * new ** (-i / half) for i in range(half)]
        if all(largest[i] <= known[i] for i in slow):
            safe.append(new)
    return len(slow), min(safe, default=None)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("measure_theta", safe_theta)
### BEGIN HIDDEN TESTS
points = min(points, check("measure_theta", safe_theta, seed=7341))
### END HIDDEN TESTS
float(points)
