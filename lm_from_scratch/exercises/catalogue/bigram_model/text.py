# %% [markdown]
# # A model that counts pairs
#
# The page's smallest model knows which letter follows which, from counting. A pair that never came would have the probability
# 0, and a word with such a pair an infinite surprise. So here each pair counts once more than it came: *add-one smoothing*.
# Write the model, and the mean surprise that it meets in other words.
#
# From the words `["ab", "b"]` with the letters `.ab`: after `b` came the end of the word twice, and nothing else. With one
# more of each, `.` has the probability 3/5 after `b`, and `a` and `b` have 1/5 each.
#
# What holds for your function:
#
# - `words` is a list of words, which may be empty. `new_words` is a list of at least one word. A word is a text of at least
#   one letter, and may be in a list several times: it counts as often.
# - A dot begins and ends each word, so that `ab` has three pairs: `.a`, `ab` and `b.`. A word of one letter has two. No pair
#   reaches from one word into the next.
# - `letters` is a text that holds the dot and all letters once, in any order. Some of them may be in no word.
# - The result is a tuple of two things. The first is a dict of dicts: `model[a][b]` is the probability that `b` comes after
#   `a`, for all `a` and `b` of `letters`, the dot too. Only `words` count for it:
#
# $$p(b \mid a) = \frac{n_{ab} + 1}{\sum_c (n_{ac} + 1)}$$
#
#   where $n_{ab}$ says how often the pair came, and $c$ goes through all of `letters`.
# - The second is a `float`: the mean of the surprise over all pairs of all `new_words`. The surprise of a pair is minus the
#   natural logarithm of its probability.
# - The two lists stay as they are.

# %%
import math


# %%
def bigram_model(
    words: list[str], new_words: list[str], letters: str
) -> tuple[dict[str, dict[str, float]], float]:
    """The model of `words`, and the mean surprise that it meets in `new_words`."""
    ### BEGIN SOLUTION
    counts = {a: dict.fromkeys(letters, 1) for a in letters}
    for word in words:
        for a, b in zip("." + word, word + "."):
            counts[a][b] += 1
    model = {}
    for a, row in counts.items():
        total = sum(row.values())
        model[a] = {b: n / total for b, n in row.items()}
    surprises = []
    for word in new_words:
        for a, b in zip("." + word, word + "."):
            surprises.append(-math.log(model[a][b]))
    return model, sum(surprises) / len(surprises)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("bigram_model", bigram_model)
### BEGIN HIDDEN TESTS
points = min(points, check("bigram_model", bigram_model, seed=7341))
### END HIDDEN TESTS
float(points)
