r"""
Beam search
===========

A language model gives a probability to every token that may come next. Our small Qwen2 has learned from Python's
documentation. After *Add a*, it finds these tokens the likeliest:
"""

# sphinx_gallery_needs = ["../1_gpt2/5_sampling", "../5_caching/2_kinds_of_cache"]
# sphinx_gallery_words = ["num_beams", "length_penalty", "early_stopping", "num_return_sequences", "greedy search", "beam width", "likeliest text", "find the most likely sentence", "beam search vs sampling", "beam search vs greedy", "best sequence", "top-k vs beam search", "most probable sentence", "most likely text", "several candidates", "return several answers", "search tree", "exhaustive search", "beam search explained", "translation decoding", "why not beam search", "short outputs", "n-best", "top candidates"]
import torch

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import generation as drawings
from lm_from_scratch.drawings.gpt2 import bars

torch.set_grad_enabled(False)
model, tokenizer = load_shipped("qwen2-docs")


def log_probs(rows):  # logarithms of what softmax gives, for each row
    return model(torch.tensor(rows))[:, -1].log_softmax(-1)  # (n, V)


ids = tokenizer.start("Add a")
best = log_probs([ids])[0].exp().topk(5)  # exp undoes the logarithm
words = tokenizer.pieces(best.indices.tolist())

assert words[:3] == [" single", " temporary", " possibly"]
bars(words, best.values.tolist())

# %%
# Let it write three tokens. The probability of a text is the product of the probabilities of its tokens, each computed
# after all tokens before it.
#
# **Predict first.** Which text does the model find likelier?
#
# * *Add a single object.*
# * *Add a temporary file.*

texts = {}
for text in (" single object.", " temporary file."):
    row, factors = list(ids), []
    for token in tokenizer.encode(text):
        factors.append(log_probs([row])[0, token].exp().item())
        row.append(token)
    texts[text] = factors[0] * factors[1] * factors[2]
    product = " × ".join(f"{factor:.1%}" for factor in factors)
    print(f"{text:16} {product} = {texts[text]:.2%}")

assert all(len(tokenizer.encode(text)) == 3 for text in texts)
assert 4 < texts[" temporary file."] / texts[" single object."] < 4.5

# %%
# *Add a temporary file.*, by a factor of more than four. After *single* nearly anything may follow, and every choice
# costs a factor. After *temporary* the model expects *file*.
#
# *Greedy search* takes the likeliest token at every step. It takes *single*, and never learns what it missed.
#
# Keep several beginnings
# -----------------------
#
# *Beam search* does not decide so early. At every step it keeps the n likeliest beginnings, called **beams**. It makes
# each of them one token longer in every possible way, and of all these *candidates* it again keeps the best n.
#
# Here are three steps with n = 3. A row is a step, with the likeliest candidate on the left. A number is the
# probability of the whole text down to this token. Boxes were kept, and the green ones are the texts that were found.
# The token without a box is the best candidate that was dropped; thousands more are not drawn.

from lm_from_scratch.generation.beam_search import beam_search, beam_steps


def piece(token):
    return tokenizer.pieces([token])[0]


# step[0]: the candidates of the first prompt, the only one
steps = [step[0] for step in beam_steps(model, [ids], 3, num_beams=3)]

firsts = [[piece(h.tokens[0]) for h in step[:3]] for step in steps]
assert firsts[0] == [" single", " temporary", " possibly"]
assert firsts[1] == [" temporary", " possibly", " single"]
found = torch.tensor(texts[" temporary file."]).log()
assert abs(steps[2][0].log_probability - found) < 1e-3
drawings.beam_tree("Add a", steps, piece, dropped=1)

# %%
# After one token *single* leads. After two it is the last of three, and *temporary file* has overtaken it; the thick
# line leads to the winner. And *single expression* was dropped, because it was only the fourth.
#
# The algorithm
# -------------
#
# Products of many probabilities become tiny, so programs add logarithms instead. A step has n beams and V tokens in
# the vocabulary, hence n × V candidates. ``flatten`` puts them into one line, V for each beam, and ``topk`` finds the
# best n, whichever beams they come from. Dividing a place in this line by V gives the beam; the remainder is the token.


def search(ids, n, new):
    V = model.config.vocab_size
    beams, sums = [ids], torch.zeros(1)
    for _ in range(new):
        totals = sums[:, None] + log_probs(beams)  # (n, V)
        sums, places = totals.flatten().topk(n)
        parents, tokens = places // V, places % V
        beams = [
            [*beams[parent], token]
            for parent, token in zip(parents.tolist(), tokens.tolist())
        ]
    return beams, sums  # the likeliest first


beams, sums = search(ids, 3, 3)
for beam, total in zip(beams, sums):
    print(f"{total.exp():.2%} {tokenizer.decode(beam[1:])!r}")

theirs = beam_search(model, [ids], 6, 3, num_return_sequences=3)[0]
mine, sums = search(ids, 3, 6)
for h, row, total in zip(theirs, mine, sums):
    assert list(h.tokens) == row[len(ids) :]
    assert abs(h.log_probability - total) < 1e-3

# %%
# That is all of beam search, except that texts may end. The package's ``beam_search`` finds the same texts, with the
# same probabilities.
#
# **Predict first.** We search for six tokens after *If not specified,* with 1 beam (greedy search) to 6 beams. What
# happens to the probability of the text that is found?
#
# * It grows, or stays as it is.
# * It becomes smaller at first.
# * It becomes smaller and smaller.

start = tokenizer.start("If not specified,")
found = {}
for n in range(1, 7):
    (row, *_), sums = search(start, n, 6)
    found[n] = sums[0].exp().item()
    print(f"{n} beams {found[n]:.2%} {tokenizer.decode(row[1:])!r}")

assert found[1] > 1.2 * max(found[n] for n in (2, 3, 4))
assert found[5] > 1.1 * found[1] and found[6] >= found[5]

# %%
# It becomes smaller at first. With two beams, other beginnings look better for a moment and crowd out the one that
# greedy search followed. Beam search is a bet, not a guarantee: more beams *usually* find likelier texts.
#
# Try other beginnings:
#
# .. live:: beams
#    :prompt: If not specified,
#
# Let texts end
# -------------
#
# Texts have different lengths. A *stop token* ends one; here it is the token between documents. A text that has
# finished waits, while other beams go on.
#
# **Predict first.** Now the search may take up to 30 tokens, and the most probable text wins. The prompt looks like the
# documentation of a function, ``weather.read``. With more beams, the text becomes
#
# * longer
# * shorter
# * neither, it only becomes better

end = tokenizer.eos_token_id
start = tokenizer.start("weather.read\n\nRead a")


def show(n, length_penalty):  # h: a hypothesis, the best text found
    h = beam_search(model, [start], 30, n, length_penalty, stop_tokens=[end])[
        0
    ][0]
    text = " ".join(tokenizer.decode(list(h.tokens)).split())
    print(f"{n} beams, {len(h.tokens)} tokens\n  Read a {text}")
    return h


ladder = [show(n, 0) for n in (1, 2, 4, 8, 16)]

lengths = [len(h.tokens) for h in ladder]
assert lengths == sorted(lengths, reverse=True)
assert lengths[0] == 30 and lengths[-1] == 6
sums = [h.log_probability for h in ladder]
assert sums == sorted(sums)

# %%
# Shorter: it shrinks from 30 tokens to 6. Every further token multiplies by a number below 1, so a short text has an
# advantage, and a better search finds more of them.
#
# So the search is not to blame. Its *aim* is wrong.
#
# The usual remedy compares texts by
#
# .. math::
#
#    \text{score} = \frac{\log p(\text{text})}{t^{\,\alpha}}
#
# where t is the number of new tokens. With α = 0 it is the sum as before, with α = 1 the mean per token. In
# ``transformers``, α is called ``length_penalty``, and the name misleads: a larger one is *kinder* to long texts. (The
# logarithm is negative, so dividing it by more *raises* the score.)

for alpha in (0, 1):
    print("α =", alpha)
    h = show(8, alpha)

assert len(h.tokens) == 30

# %%
# With α = 1 the same eight beams go on to the last of the 30 tokens.
#
# The likeliest text is dull
# --------------------------
#
# So now we find likely texts of any length. Do we want them? Here is a page of Python's documentation that the model
# was not trained on. It is continued in three ways: as its authors wrote it, by four beams, and by tokens that are
# drawn at random from the whole vocabulary. The darker a token, the more it surprises the model. One bit is the
# surprise of a coin toss; ten bits belong to a chance of 1 in 1,024.

import math

from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.logit_processors import forbid
from lm_from_scratch.text import corpora

_, held_out = corpora.split(corpora.reference())
(page,) = [d.text for d in held_out if d.name == "reference/formatstrings"]
row = tokenizer.start(page)
start, real = row[:40], row[40:65]
print(tokenizer.decode(start[1:]))

only = [forbid([end])]  # so that no text ends before 25 tokens
likely = beam_search(model, [start], 25, 4, processors=only)[0][0]
drawn = complete(generate(model, [start], 25, seed=2, processors=only))[0]
texts = {"real text": real, "4 beams": list(likely.tokens), "drawn": drawn}

shown = {}
for name, new in texts.items():
    logits = model(torch.tensor([[*start, *new]]))[0, len(start) - 1 : -1]
    # of each row, take the number of the token that came
    picked = logits.log_softmax(-1).gather(-1, torch.tensor(new)[:, None])
    shown[name] = tokenizer.pieces(new), (-picked[:, 0] / math.log(2)).tolist()

mean = {name: sum(bits) / 25 for name, (_, bits) in shown.items()}
assert mean["4 beams"] < 1.5 < 2.5 < mean["drawn"] and mean["real text"] > 4
assert len(set(likely.tokens)) < 8 and len(set(real)) > 18
assert tokenizer.decode(real).endswith("formatted")
drawings.surprise(shown)

# %%
# The beams repeat themselves, because nothing is as easy to guess as a repetition. The real text has a surprise every
# few words. That is why somebody wrote it down.
#
# So use beams where one answer is right and every surprise is a mistake: translation, speech recognition. For open
# text, `draw the tokens <../1_gpt2/5_sampling.ipynb>`_.
#
# The cache follows the beams
# ---------------------------
#
# With a cache, row i holds the keys and values of beam i. When beam 0 gets two children and beam 2 none, the rows must
# follow: row i becomes a copy of the row of its *parent*.
#
# In ``transformers`` the code that moves the rows looked for caches under one name. Mamba, another kind of model, kept
# its state under another (`issue 46612 <https://github.com/huggingface/transformers/issues/46612>`_). So whenever the
# beams changed places, they went on from the state of *other* beams. There was no error, and the text looked like text.
# One full forward pass over the result would have found it: the probability that the search reports must be the one
# that the model gives.
#
# That check, a proof that a text is the likeliest of all, and the search of ``transformers`` are in
# `beam search in depth <1a_beam_search_in_depth.ipynb>`_ and in `the likeliest text <1b_likeliest_text.ipynb>`_.
#
# Exercises
# ---------
#
# 1. *Easy.* Draw the tree of another prompt with ``num_beams=2``. A good answer shows a step in which both new beams
#    have one parent. Hint: compare ``h.parent`` of the candidates whose ``h.fate`` is ``"kept"``.
# 2. *Easy.* Give ``search`` a number ``n`` of beams that makes it find the likeliest of *all* texts of two tokens. A
#    good answer says why no smaller number is safe.
# 3. *Medium.* Let ``search`` stop texts at ``end``, with α as an argument. A good answer gives the five texts above
#    that shrink from 30 tokens to 6.
#
# Summary
# -------
#
# * The likeliest next token need not begin the likeliest text. Beam search keeps n beginnings, and decides later.
# * A step ranks n × V candidates by the sum of their log-probabilities. Sums favour short texts, so divide by
#   :math:`t^{\,\alpha}`, where t is the number of new tokens.
# * Likely is not good: the likeliest texts are short, or they repeat themselves.
