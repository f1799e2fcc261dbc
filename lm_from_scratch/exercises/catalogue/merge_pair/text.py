# %% [markdown]
# # One merge of byte-pair encoding
#
# A tokenizer is learned merge by merge. Each merge looks for the pair of neighbours that is most
# frequent in all words, gives it an id of its own, and writes the new id wherever the pair was.
# The page did this with pieces of text. Here the pieces are ids, as in a real tokenizer.
#
# Write one such step. For the words `[1, 2, 3]` (4 times) and `[2, 3]` (3 times) and the new id
# 300, the pair is `(2, 3)` with 7 occurrences, and the words become `[1, 300]` and `[300]`.
#
# What holds for your function:
#
# - `words` is a list of words, each a list of at least one id. `counts[i]` says how often word i
#   occurs in the text, so each of its pairs counts as often. A word may be in the list twice.
#   `new_id` occurs in no word. Ids may be large: Qwen2 has 151,936.
# - Every pair of neighbours inside a word counts, also where two overlap: in `[7, 7, 7]` the pair
#   `(7, 7)` occurs twice. `(2, 3)` and `(3, 2)` are different pairs. No pair reaches from one word
#   into the next.
# - If several pairs are equally frequent, the one with the smaller first id wins, and among those
#   the one with the smaller second id.
# - The pair is replaced from left to right, and each id is used once: `[7, 7, 7]` becomes
#   `[300, 7]`.
# - The result is a tuple of two things: the pair, as a tuple of two ids, and the new words, as a
#   list in the old order. If no word has a pair, the result is `None` and words equal to the old.
# - The caller's `words` and `counts` stay as they are, the lists inside too.

# %%
from collections import Counter
from itertools import pairwise


# %%
def merge_step(
    words: list[list[int]], counts: list[int], new_id: int
) -> tuple[tuple[int, int] | None, list[list[int]]]:
    """The most frequent pair of neighbours, and the words with this pair as one id."""
    ### BEGIN SOLUTION
    pairs = Counter()
    for word, count in zip(words, counts):
        for pair in pairwise(word):
            pairs[pair] += count
    if not pairs:
        return None, words
    best = min(pairs, key=lambda pair: (-pairs[pair], pair))
    merged = []
    for word in words:
        new = []
        for i in word:
            if new and (new[-1], i) == best:
                new[-1] = new_id
            else:
                new.append(i)
        merged.append(new)
    return best, merged
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("merge_pair", merge_step)
### BEGIN HIDDEN TESTS
points = min(points, check("merge_pair", merge_step, seed=7341))
### END HIDDEN TESTS
float(points)
