# %% [markdown]
# # Warm-up, then half a cosine
#
# Write the learning rate of a training run as a function of the number of the step. It rises on a
# straight line for the first steps, while Adam's means rest on few batches. Then it falls along half
# a cosine, and reaches its lowest value in the last step of the run. With $w$ steps of warm-up and
# $T$ steps in all:
#
# $$\eta_t = \eta\, \frac{t}{w} \quad (t \le w) \qquad
# \eta_t = \eta_{\min} + \frac{1 + \cos(\pi p)}{2}\, (\eta - \eta_{\min}), \quad
# p = \frac{t - w}{T - w} \quad (t > w)$$
#
# What holds for your function:
#
# - `step` is $t$, 1 for the first step and `steps` for the last one. `steps` is $T$, `lr` is $\eta$,
#   `min_lr` is $\eta_{\min}$, `warmup` is $w$. Without other values `min_lr` and `warmup` are 0.
# - The result is a Python `float`, and depends on the arguments alone: a resumed run calls your
#   function for the first time in the middle.
# - Step `warmup` has the rate `lr`, step `steps` has the rate `min_lr`. The rise begins at 0 and not
#   at `min_lr`, so that step 1 has the rate `lr / warmup`.
# - Without warm-up the cosine begins at once, and its first step is already a little below `lr`.
# - After the last step the rate stays at `min_lr`.
# - A warm-up that is not shorter than the run raises a `ValueError`.

# %%
import math


# %%
def learning_rate(
    step: int, steps: int, lr: float, min_lr: float = 0.0, warmup: int = 0
) -> float:
    """The learning rate of one step."""
    ### BEGIN SOLUTION
    if warmup >= steps:
        raise ValueError(f"warmup={warmup} must be shorter than steps={steps}")
    if step <= warmup:
        return lr * step / warmup
    progress = min((step - warmup) / (steps - warmup), 1.0)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_lr + cosine * (lr - min_lr)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("lr_schedule", learning_rate)
### BEGIN HIDDEN TESTS
points = min(points, check("lr_schedule", learning_rate, seed=7341))
### END HIDDEN TESTS
float(points)
