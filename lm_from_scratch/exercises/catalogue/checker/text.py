# %% [markdown]
# # A checker that cannot be tricked
#
# A model that learns from rewards learns whatever the reward pays for. If the checker has a hole, the model will find
# it: a run of a thousand steps tries more answers than you ever will. Here you write a checker without a hole.
#
# The game is *countdown*. A question such as `2 3 4>10` gives numbers and a target: write an expression that uses all
# the numbers and comes to the target. There are often several right answers, here `2*3+4` and `(3*2)+4` among them.
# The answer is whatever text the model wrote.
#
# **Decide before you write** how you read an expression. Python's `eval` reads far more than this game has, and
# `9**9**9**9` keeps it busy for longer than a run can wait. A regular expression can say which characters are allowed,
# but not whether brackets match.
#
# What holds for your function:
#
# - `question` always has the right form: one to five whole numbers without a sign, a space between them, then `>` and
#   the target, as above. None has a leading zero. Numbers may be equal, and the target may be one of them.
# - `answer` is any text at all. The result is `True` or `False`, and nothing is ever raised.
# - An answer is right if it is one expression that comes to the target and uses **every number of the question, each as
#   often as it is given**, and no other number.
#
#   | expression | example |
#   |---|---|
#   | a number | digits `0` to `9`, without a leading zero: `0`, `7`, `40` |
#   | two expressions with `+`, `-` or `*` between them | `*` before `+` and `-`, otherwise from left to right |
#   | an expression in brackets | `(` and `)`, as deep as you like |
#
# - Nothing else is allowed: no sign before a number or a bracket, no other operator, no space or end of line anywhere,
#   no product without `*`, no digits of other alphabets. Results within the expression may be below zero or large.
# - An answer of more than 200 characters is wrong. Every text is judged within a moment, however deep its brackets are.

# %%
import re


# %%
def is_countdown(question: str, answer: str) -> bool:
    """Whether the answer uses the numbers of the question, and comes to its target."""
    ### BEGIN SOLUTION
    given, target = question.split(">")
    tokens = re.findall("[0-9]+|[-+*()]", answer)
    if len(answer) > 200 or "".join(tokens) != answer:
        return False
    numbers = [token for token in tokens if token not in "-+*()"]
    if sorted(numbers) != sorted(given.split()):
        return False
    rest = [*tokens, "end"][::-1]

    def total() -> int:
        result = product()
        while rest[-1] in ("+", "-"):
            sign = rest.pop()
            result = result + product() if sign == "+" else result - product()
        return result

    def product() -> int:
        result = atom()
        while rest[-1] == "*":
            rest.pop()
            result *= atom()
        return result

    def atom() -> int:
        token = rest.pop()
        if token != "(":
            return int(token)
        result = total()
        if rest.pop() != ")":
            raise ValueError("a bracket is not closed")
        return result

    try:
        return total() == int(target) and rest == ["end"]
    except ValueError:
        return False
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("checker", is_countdown)
### BEGIN HIDDEN TESTS
points = min(points, check("checker", is_countdown, seed=7341))
### END HIDDEN TESTS
float(points)
