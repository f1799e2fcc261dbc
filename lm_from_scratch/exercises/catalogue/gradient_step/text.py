# %% [markdown]
# # One step downhill
#
# The loop of the page does four things, again and again: it computes the loss, finds the slopes, moves the parameters against
# them, and sets the slopes back to 0. Write one turn of such a loop, for any parameters and any loss. It should be right in
# the first turn as in the hundredth, whatever happened to these numbers before.
#
# If the loss is `(a - 3) ** 2` and `a` is 5, the loss is 4 and its slope is 4. With `lr=0.1` the step moves `a` to 4.6, and the
# result is 4.
#
# What holds for your function:
#
# - `parameters` is a list of `Value`s. `loss_of()` takes no argument, and computes the loss from what their `data` is now. It
#   gives a `Value`. A step calls it once.
# - Each parameter moves by its slope times `lr`, in the direction in which the loss falls. All slopes are those at the place
#   where the step begins.
# - The result is the loss *before* the move: a plain number, no `Value`.
# - When your function is called, the `grad` of a parameter may hold anything: the slope of an earlier step, or that of
#   another loss. It does not count. What is in `grad` afterwards is your own affair.
# - A parameter that the loss does not depend on stays where it is.
# - The loss may depend on other `Value`s that are not in `parameters`. These stay where they are.
# - The list holds the same `Value`s afterwards, with new `data`: `loss_of` knows these, and would not look at others.

# %%
from collections.abc import Callable

from lm_from_scratch.training.autograd import Value


# %%
def gradient_step(
    parameters: list[Value], loss_of: Callable[[], Value], lr: float
) -> float:
    """Move the parameters one step downhill; the loss before it."""
    ### BEGIN SOLUTION
    loss = loss_of()
    for p in parameters:
        p.grad = 0.0
    loss.backward()
    for p in parameters:
        p.data -= lr * p.grad
    return loss.data
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("gradient_step", gradient_step)
### BEGIN HIDDEN TESTS
points = min(points, check("gradient_step", gradient_step, seed=7341))
### END HIDDEN TESTS
float(points)
