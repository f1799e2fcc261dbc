# %% [markdown]
# # Parents before their children
#
# `backward` goes through all numbers of a computation, and no number may pass its slope on before it has got all of it.
# So it needs an order in which parents come before their children, to go through it from the end. The page found one with a
# function that calls itself for each parent. For a long computation this does not work: Python stops a function that has
# called itself about a thousand times, with a `RecursionError`. A sum of 5,000 numbers, added one after the other, is as
# deep as that five times over.
#
# Write the order with a loop. For `c = a * b` and `root = c + a`, one right answer is `[a, b, c, root]`, and another is
# `[b, a, c, root]`.
#
# What holds for your function:
#
# - `root` is a `Value`. It has `parents`, a tuple of `Value`s, which may be empty. The same one may be in it twice, as in
#   `a * a`. All parents of parents are `Value`s too. Your function reads `parents` and nothing else, and changes nothing.
# - The result is a list. It holds `root`, its parents, their parents, and so on: each of them once, and each after all
#   its parents. Any such order is right.
# - Two `Value`s with the same number are two. They can be in a set, or be keys of a dict: whether one is there takes a
#   moment only, however many there are.
# - A chain of 5,000 `Value`s works, without a change of Python's limit.
# - There may be many ways from `root` to a number: 16 times in a row, `x = x + x` makes 65,536 ways through 17 numbers. A
#   function that walks all of them takes too long, and so does one that looks at all numbers again for each number of a
#   long chain. The check counts how often `parents` is read, and stops what reads it far too often.

# %%
from lm_from_scratch.training.autograd import Value


# %%
def topological_order(root: Value) -> list[Value]:
    """The root and all that it was computed from, parents before children."""
    ### BEGIN SOLUTION
    order, done, stack = [], set(), [root]
    while stack:
        value = stack[-1]
        missing = [parent for parent in value.parents if parent not in done]
        if missing:
            stack += missing
        else:
            stack.pop()
            if value not in done:
                order.append(value)
            done.add(value)
    return order
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("topological_order", topological_order)
### BEGIN HIDDEN TESTS
points = min(points, check("topological_order", topological_order, seed=7341))
### END HIDDEN TESTS
float(points)
