r"""
Beam search in depth
====================

The lesson on `beam search <1_beam_search.ipynb>`_ keeps several beginnings of a text and finds likelier texts. How do
you know that a search is right? A wrong one raises no error, and its text looks like text. This page checks one in
four ways: by a forward pass over its result, by hand, against all texts of a tiny vocabulary, and against
``transformers``.

Letters name axes: V entries of the vocabulary, n beams, t new tokens.

What greedy search misses
-------------------------

A language model gives each continuation y of a prompt x a probability, a product with one factor for each token.
Logarithms turn it into a sum:

.. math::

   \log p(y \mid x) = \sum_{i=1}^{t} \log p(y_i \mid x, y_1 \dots y_{i-1})

One forward pass over the whole text computes it, without a cache and without a search. The function
``log_probability`` does this, and judges everything on this page. The model is the small GPT-2 that was trained on
Python's documentation.
"""

import itertools

import torch
import transformers

from lm_from_scratch.checkpoint.folders import PRETRAINED
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings import generation as drawings
from lm_from_scratch.generation.beam_search import beam_search, beam_steps
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.instruments.plot import printable

torch.set_grad_enabled(False)
transformers.utils.logging.disable_progress_bar()
model, tokenizer = load_shipped()
end, V = tokenizer.eos_token_id, model.config.vocab_size


def log_probability(model, prompt, tokens):
    idx = torch.tensor([[*prompt, *tokens]])
    logits = model(idx)[0, len(prompt) - 1 : -1].double()  # (t, V)
    chosen = idx[0, len(prompt) :, None]
    return logits.log_softmax(-1).gather(-1, chosen).sum().item()


def text(tokens):
    return printable(tokenizer.decode(list(tokens)))


# %%
# Sixteen beginnings get six more tokens each, from greedy search and from three beams.

beginnings = [
    "The", "Return the", "If the argument is", "def __init__(self",
    "for i in range(", "The value of the", "Raise ValueError if the",
    "It is possible to", "A list of", "This function", "An object that",
    "The default value is", "Changed in version", "Deprecated since",
    "Note that", "Return the number of items in",
]  # fmt: skip
prompts = [[end, *tokenizer.encode(b)] for b in beginnings]
greedy = complete(generate(model, prompts, 6, GREEDY))
found = [own[0] for own in beam_search(model, prompts, 6, num_beams=3)]

gains = {}
for beginning, prompt, row, best in zip(beginnings, prompts, greedy, found):
    judged = log_probability(model, prompt, best.tokens)
    assert abs(judged - best.log_probability) < 1e-3
    gains[beginning] = judged - log_probability(model, prompt, row)
    if gains[beginning] > 0.5:
        print(f"+{gains[beginning]:.1f}  {beginning!r}")
        print(f"      {text(row)}\n      {text(best.tokens)}")
likelier = sum(gain > 1e-3 for gain in gains.values())
print(f"{likelier} of {len(prompts)} texts are likelier")
assert likelier >= 6 and gains["The value of the"] > 2

# %%
# The first line of a pair is from greedy search, the second from the beams; the number is the gain in log-probability.
# ``␣`` is a space and ``↵`` a line end.
#
# After *The value of the* the two differ from the first token on. This prompt is the example of the next sections.
#
# The search as a tree
# --------------------
#
# At each step ``beam_steps`` yields a list of candidates for every prompt, most likely first. Each candidate is *kept*
# as a beam, has *finished*, or is *dropped*. Here any token with a line end is a stop token, which finishes a text.

lines = [t for t in range(V) if "\n" in tokenizer.decode([t])]
prompt = prompts[beginnings.index("The value of the")]
steps = list(beam_steps(model, [prompt], 6, 3, stop_tokens=lines))
tree = [step[0] for step in steps]
print(tree[2][0])

ended = [h for step in tree for h in step if h.fate == "finished"]
winner = max(ended, key=lambda h: h.score)

drawings.beam_tree(
    "The value of the", tree, lambda token: tokenizer.pieces([token])[0]
)

# %%
# The tree is drawn as in the lesson: blue candidates are kept, green ones have finished, and of those that were dropped
# it shows the two best. The thick line leads to the result.
#
# The token *value* of greedy search is the likeliest, and the quotation mark comes third. One step later it is second,
# and after two it leads.

for h in sorted(ended, key=lambda h: h.score, reverse=True):
    print(f"{h.score:6.2f}  {h.log_probability:6.2f}  {text(h.tokens)}")
(returned,) = beam_search(model, [prompt], 6, 3, stop_tokens=lines)
assert returned[0] == winner
g, q = greedy[beginnings.index("The value of the")][0], winner.tokens[0]
kept = [[h.tokens[0] for h in step if h.fate == "kept"] for step in tree]
assert kept[0][0] == g and kept[0][2] == q and tokenizer.decode([q]) == ' "'
assert kept[1][:2] == [g, q] and kept[2][0] == q

# %%
# The list shows the score and the log-probability of what finished. Here both give the same order. They need not: the
# score is divided by the length, so a long text can overtake a likelier short one, as `the likeliest text
# <1b_likeliest_text.ipynb>`_ shows.
#
# One step, taken apart
# ---------------------
#
# Let beam b have the log-probability :math:`s_b`. Every beam can go on in V ways, so there are :math:`n \cdot V`
# candidates. The one that adds token v has
#
# .. math::
#
#    s_b + \log p(v \mid x, \text{beam } b)
#
# The best of them all are the next beams. Here is the third step by hand, from full forward passes.

beams = [h for h in tree[1] if h.fate == "kept"]
idx = torch.tensor([[*prompt, *h.tokens] for h in beams])
own = torch.tensor([[h.log_probability] for h in beams])  # (n, 1)
totals = own + model(idx)[:, -1].log_softmax(-1)  # (n, V)
top = totals.flatten().topk(6)
print(tuple(totals.shape), "gives", totals.numel(), "candidates")
for value, place, h in zip(top.values, top.indices.tolist(), tree[2]):
    parent, token = divmod(place, V)
    print(f"{value:.2f}  beam {parent}  {text(h.tokens):8} {h.fate}")
    assert (parent, token) == (h.parent, h.tokens[-1])
    assert abs(value - h.log_probability) < 1e-3
assert totals.numel() == 3 * V

# %%
# The package does not sort all of them. Of one beam, no more than n candidates can be kept, and no more can finish
# than there are stop tokens, so the best n plus that many of each beam are enough.
#
# Look at the numbers of the beams: they have changed places. The new beam 0 continues the old beam 1. The keys and
# values in the cache have to follow: row i of the cache must become a copy of row ``parents[i]``.

from lm_from_scratch.cache.growing import GrowingCache

parents = [h.parent for h in tree[2] if h.fate == "kept"]
cache = GrowingCache(model.config.n_layer)
model(idx, cache=cache)
before = cache.contents(0)[0]  # the keys of layer 0, (n, H, S, D)
cache.select(torch.tensor(parents))
print("parents", parents)
assert parents == [1, 2, 0]
assert cache.contents(0)[0].equal(before[parents])
assert not cache.contents(0)[0].equal(before)

# %%
# This copies all keys and values at each step. A `paged cache <3b_engine_in_depth.ipynb>`_, whose rows share what
# they have in common, copies none of them.
#
# Compared with all texts
# -----------------------
#
# With a vocabulary of six tokens there are :math:`6^4` texts of four tokens, few enough to compute the probability of
# each. The model is a tiny GPT-2 with large random weights. For forty prompts, the likeliest text is found both ways:
# by looking at all texts, and by beam search.

from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.models.gpt2 import GPT2Config
from lm_from_scratch.models.randomize import randomize_

six = GPT2Config(
    vocab_size=6, block_size=16, n_layer=2, n_head=4, n_embd=36,
    eos_token_id=None, bos_token_id=None,
)  # fmt: skip
tiny = build(six).eval()
randomize_(tiny)

generator = torch.Generator().manual_seed(0)
texts = torch.tensor(list(itertools.product(range(6), repeat=4)))
starts = torch.randint(6, (40, 3), generator=generator).tolist()
best = {}
for i, start in enumerate(starts):
    idx = torch.cat([torch.tensor([start]).expand(len(texts), 3), texts], 1)
    scores = tiny(idx[:, :-1])[:, 2:].log_softmax(-1)  # (6**4, 4, 6)
    scores = scores.gather(-1, texts[..., None]).sum((1, 2))
    best[i] = scores.max().item()
    assert abs(scores.double().exp().sum() - 1) < 1e-4

right = {}
for n in (1, 2, 4, 8, 16, 6**3):
    results = beam_search(tiny, starts, 4, n)
    pairs = [(own[0].log_probability, best[i]) for i, own in enumerate(results)]
    assert all(got < most + 1e-4 for got, most in pairs)
    right[n] = sum(got > most - 1e-4 for got, most in pairs)
print("beams: prompts for which the likeliest of all texts is found")
print(right)
assert right[6**3] == 40 and right[1] < 40

# %%
# No search finds a text that is likelier than the best, and :math:`V^{t-1}` beams must find the best: with so many, no
# beginning is ever dropped. The probabilities of all texts sum to 1, which checks the list itself.
#
# Equal to transformers
# ---------------------
#
# Eight beginnings of docstrings get up to 15 tokens to reach their end, the end-of-text token. The library's
# ``generate`` with ``num_beams`` reads the same weights. All eight prompts go in as one batch with padding on the left,
# and all n results come back.

functions = [
    "garden.Plant.water\n\nReturn the", "music.Song.play\n\nThis",
    "shop.Basket.count\n\nReturn the number of", "weather.read\n\nRead a",
    "letters.Envelope.seal\n\nClose the", "maps.Route.length\n\nThe",
    "clock.now\n\nReturn True if", "paint.mix\n\nIf",
]  # fmt: skip
docs = [[end, *tokenizer.encode(f)] for f in functions]

from lm_from_scratch.text.batch import padded_batch

load = transformers.AutoModelForCausalLM.from_pretrained
library = load(PRETRAINED / "gpt2-docs", dtype=torch.float32).eval()


def theirs(prompts, n, stop=end, **options):
    batch = padded_batch(prompts, end, side="left")
    out = library.generate(
        batch.idx, attention_mask=(batch.positions >= 0).long(), num_beams=n,
        num_return_sequences=n, do_sample=False, eos_token_id=stop,
        pad_token_id=end, return_dict_in_generate=True, output_scores=True,
        **options,
    )  # fmt: skip
    rows = out.sequences[:, batch.idx.shape[1] :].tolist()
    rows = [row[: row.index(end) + 1] if end in row else row for row in rows]
    return rows, out.sequences_scores


for n, alpha, early in ((2, 1.0, True), (3, 0.0, False), (4, 2.0, "never")):
    rows, scores = theirs(
        docs, n, max_new_tokens=15, length_penalty=alpha, early_stopping=early
    )
    results = beam_search(model, docs, 15, n, alpha, early, n, [end])
    ours = [h for own in results for h in own]
    assert [list(h.tokens) for h in ours] == rows
    error = (torch.tensor([h.score for h in ours]) - scores).abs().max()
    assert error < 1e-3
    print(f"n {n}, penalty {alpha}, {early!s}: {len(rows)} texts, {error:.0e}")

# %%
# Every token is equal, and scores are equal up to rounding. Two things in the library are odd. It fills the places of
# beams and results that do not exist with scores of -1e9. If only a few tokens are allowed, these places come out as
# results.

allowed = tokenizer.encode(" a")[:1] + tokenizer.encode(" the")[:1]
others = [token for token in range(V) if token not in allowed]
rows, scores = theirs(
    docs[:1], 3, None, max_new_tokens=1, suppress_tokens=others
)
print("transformers:", rows, [round(s, 2) for s in scores.tolist()])

from lm_from_scratch.generation.logit_processors import forbid, no_repeat_ngram

only = [forbid(others)]
(ours,) = beam_search(model, docs[:1], 1, 3, 1.0, False, 3, processors=only)
print("here:        ", [list(h.tokens) for h in ours])
assert rows[2] == [-1] and scores[2] == -1e9
assert [list(h.tokens) for h in ours] == rows[:2]

# %%
# And a negative penalty can push true scores below the placeholder, which then wins. The package fills nothing, and
# returns fewer results instead.

_, scores = theirs(docs[:1], 3, None, max_new_tokens=20, length_penalty=-8.0)
((real,),) = beam_search(model, docs[:1], 20, 3, -8.0)
print(f"transformers: {scores[0]:.0e}, here: {real.score:.0e}")
assert scores[0] == -1e9 and real.score < -1e10 and len(real.tokens) == 20

# %%
# What it costs
# -------------
#
# A prompt of T tokens is read once. Each of the other :math:`t - 1` steps runs n rows, where greedy search runs one. A
# hook, a function that PyTorch calls before every pass, counts the tokens that enter the model.

long = [end, *tokenizer.encode("The value of the argument is the name of")]
long += tokenizer.encode(" a file, or None if there is no such file.")
config, counted = model.config, []
hook = model.register_forward_pre_hook(
    lambda module, args: counted.append(args[0].numel())
)
T, tokens, size = len(long), {}, {}
for n in (1, 2, 4, 8):
    counted.clear()
    cache = GrowingCache(config.n_layer)
    beam_search(model, [long], 40, n, cache=cache)
    tokens[n], size[n] = sum(counted), cache.nbytes
    ratio = tokens[n] / tokens[1]
    print(f"{n} beams: {tokens[n]} tokens, {ratio:.1f} times greedy")
    assert tokens[n] == T + n * 39 and size[n] == n * size[1]
hook.remove()

# %%
# A cache whose rows share nothing grows n times as large.
#
# Bug museum
# ----------
#
# The cache that was not reordered
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Beams are reordered and their cache is not: they go on from the state of other beams. (M10)
#
# The lesson says how that happened to Mamba in ``transformers``. Here is the same mistake with a cache of keys and
# values:


class NotReordered(GrowingCache):
    def select(self, rows):
        if self.batch != len(rows):  # at first one row becomes n
            super().select(rows)


stays = NotReordered(config.n_layer)
for name, cache in (("fixed", None), ("wrong", stays)):
    ((h, *_),) = beam_search(model, [prompt], 12, 3, cache=cache)
    judged = log_probability(model, prompt, h.tokens)
    print(f"{name}: reports {h.log_probability:.2f}, has {judged:.2f}")
    print("  ", text(h.tokens))
    assert (abs(h.log_probability - judged) < 1e-3) == (name == "fixed")

# %%
# Nothing fails, and the text looks like a text. The fixed line is ``cache.select(parents)`` for every kind of cache.
# The check that finds it is the one from the top of this page: one full forward pass over the result.
#
# Reordered, and no longer a cache
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The Qwen2 of ``transformers`` 4.42 reordered with a function that builds a tuple of tensors. It was right when caches
# were tuples. (Q16)


def reorder(past, rows):
    return tuple(tuple(part[rows] for part in layer[:2]) for layer in past)


rows = torch.tensor([0, 0, 1])
for kind in (transformers.DynamicCache, transformers.StaticCache):
    room = {} if kind is transformers.DynamicCache else {"max_cache_len": 20}
    past = kind(config=library.config, **room)
    library(idx := torch.tensor([prompt] * 3), past_key_values=past)
    try:
        library(idx[:, :1], past_key_values=reorder(past, rows))
        raise AssertionError("a tuple must not pass for a cache")
    except (AttributeError, TypeError) as error:
        print(f"{kind.__name__}: {error}")
    past.reorder_cache(rows)
    assert isinstance(past, kind)

# %%
# A growing cache became a tuple, which does not know its length; a static one cannot be walked through by layers. The
# fixed line is ``past.reorder_cache(rows)``: the cache reorders itself, and stays what it is. The check is a search
# with every kind of cache, all of which must find the same.
#
# Which sentence is false?
# ------------------------
#
# 1. With one beam and the default settings, beam search writes what greedy search writes.
# 2. Beam search never finds a less likely text than greedy search.
# 3. With ``length_penalty=0``, a text never scores better than its own beginning.
# 4. A processor that forbids tokens does not change the log-probability that is reported for a text.
#
# Decide before you look at the numbers.

one = [list(own[0].tokens) for own in beam_search(model, prompts, 6, 1)]
when = [end, *tokenizer.encode("Note that")]
(row,) = complete(generate(model, [when], 6, GREEDY))
((narrow,),) = beam_search(model, [when], 6, 3)
two = log_probability(model, when, row), narrow.log_probability
lost = [
    h.tokens
    for (step,) in beam_steps(model, [when], 6, 3)
    for h in step
    if h.fate == "dropped" and list(h.tokens) == row[: len(h.tokens)]
]
rises, before = 0, [0.0]
for step in tree:
    rises += sum(h.log_probability > before[h.parent] for h in step)
    before = [h.log_probability for h in step if h.fate == "kept"]
((forced,),) = beam_search(
    model, [prompt], 12, 3, processors=[no_repeat_ngram(1)]
)
four = forced.log_probability - log_probability(model, prompt, forced.tokens)
print(f"1. equal: {one == greedy}   2. greedy {two[0]:.2f}, beams {two[1]:.2f}")
print(f"3. tokens that raise a sum: {rises}   4. difference {four:.0e}")
assert one == greedy and two[0] > two[1] + 0.1
assert lost and not rises and abs(four) < 1e-3

# %%
# The second is false, as in the lesson: three other beginnings looked better for a while and crowded out the one that
# greedy search followed.
#
# Exercises
# ---------
#
# 1. *Hard.* Beams are often near copies. Split them into groups and punish a token that an earlier group has just
#    chosen. Hint: Vijayakumar and others, *Diverse Beam Search*. A good answer shows that the results share fewer
#    4-grams, and what log-probability this costs.
#
# Summary
# -------
#
# * Three beams found a likelier text than greedy search for at least 6 of 16 prompts, and one full forward pass
#   confirmed every log-probability. For one of the 16 they found a less likely one.
# * A step ranks :math:`n V` candidates, and the rows of the cache follow the beams.
# * Compared with all texts of a tiny vocabulary, :math:`V^{t-1}` beams were always right.
# * ``transformers`` gave the same tokens and scores, and placeholders at -1e9 where nothing was left to find.
# * n beams ran :math:`T + n (t - 1)` tokens through the model.
#
# Sources
# -------
#
# * Lowerre, *The HARPY Speech Recognition System*, 1976: the search.
# * `Diverse Beam Search <https://arxiv.org/abs/1610.02424>`_, Vijayakumar et al., 2016.
# * The cache that was not reordered: `beam search and the caches of Mamba <https://github.com/huggingface/transformers/issues/46612>`_.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
