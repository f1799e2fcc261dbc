# %% [markdown]
# # Bug hunt: the second round
#
# A program trains a model on more points than fit into memory at once. So it takes one point after the other, lets the slopes of
# all of them add up, and then moves the parameters once: that is a *round*. After a round the parameters agreed with those
# of PyTorch to the last digit, with any points and any learning rate.
#
# After two rounds they did not. The second move is too long, and so is the third. Somebody halved the learning rate. The
# first move became half as long, and the second one was too long again.
#
# Find what is wrong, and write the function again. What holds for it:
#
# - `parameters` is a list of `Value`s. `points` is a list of at least one point. `loss_of(point)` computes the loss of one point
#   from what the `data` of the parameters is now, and gives a `Value`. It is called once for each point in each round.
# - A round moves each parameter by `lr` times the slope of the *mean* loss of all points, downhill. In a round all slopes are
#   those at the place where it begins.
# - The result is a list of as many plain numbers as there are `rounds`, at least one: the mean loss of all points, before the
#   parameters move.
# - When your function is called, the `grad` of a parameter may hold anything. It does not count. What is in `grad` afterwards
#   is your own affair.
# - The lists stay as they are. `parameters` holds the same `Value`s afterwards, with new `data`.

# %%
from collections.abc import Callable
from typing import Any

from lm_from_scratch.training.autograd import Value


# %%
def train_rounds_as_found(
    parameters: list[Value],
    points: list[Any],
    loss_of: Callable[[Any], Value],
    lr: float,
    rounds: int,
) -> list[float]:
    """The mean loss before each round; the parameters move."""
    losses = []
    for _ in range(rounds):
        total = 0.0
        for point in points:
            loss = loss_of(point)
            loss.backward()  # its slopes are added to those of the others
            total += loss.data
        losses.append(total / len(points))
        for p in parameters:
            p.data -= lr * p.grad / len(points)
        loss.grad = 0.0  # for the next round
    return losses


# %%
from lm_from_scratch.exercises import check

check("hunt_second_round", train_rounds_as_found)

# %% [markdown]
# One line looks as if it had taken care of it. Before you write: at how many places could the line that is missing stand, and
# at which of them would it throw away too much?


# %%
def train_rounds(
    parameters: list[Value],
    points: list[Any],
    loss_of: Callable[[Any], Value],
    lr: float,
    rounds: int,
) -> list[float]:
    """The mean loss before each round; the parameters move."""
    ### BEGIN SOLUTION
    losses = []
    for _ in range(rounds):
        for p in parameters:
            p.grad = 0.0  # a round begins with no slopes
        total = 0.0
        for point in points:
            loss = loss_of(point)
            loss.backward()  # its slopes are added to those of the others
            total += loss.data
        losses.append(total / len(points))
        for p in parameters:
            p.data -= lr * p.grad / len(points)
    return losses
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("hunt_second_round", train_rounds)
### BEGIN HIDDEN TESTS
points = min(points, check("hunt_second_round", train_rounds, seed=7341))
### END HIDDEN TESTS
float(points)
