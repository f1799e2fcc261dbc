r"""
Seven ways to get padding wrong, in depth
=========================================

The lesson on `batches of unequal prompts <4_padded_batches.ipynb>`_ fixes a program in three steps. Which mistakes are
there, what does each of them do alone, and which test sees it? This page plants seven of them, one at a time, in a
program that is right. Two leave the first token right, and one is outside the model. At the end: what can rounding
still change, when nothing is wrong?

A program that is right
-----------------------

The functions of the package pad on the left, and give each token a position in its own row: -1 for padding.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_words = ["padding_side", "pad_token = eos_token", "repetition_penalty", "batch size changes output", "garbage output in batch", "left or right padding", "batch invariance", "bfloat16 batch differs", "ragged batch"]
import copy
from functools import partial

import matplotlib.pyplot as plt
import torch
import transformers

from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.attention.visibility import PADDING
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.folders import PRETRAINED
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.generation.generate import (
    Chooser,
    complete,
    decode,
    generate,
    prefill,
)
from lm_from_scratch.generation.sampling import GREEDY, Sampler
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.models.gpt2 import GPT2Config
from lm_from_scratch.models.qwen2 import Qwen2Config
from lm_from_scratch.models.randomize import randomize_
from lm_from_scratch.text.batch import padded_batch

torch.set_grad_enabled(False)
transformers.utils.logging.disable_progress_bar()
model, tokenizer = load_shipped()
end = tokenizer.eos_token_id
batch = padded_batch([[11, 12], [21, 22, 23, 24]], pad_token_id=0, side="left")
print(batch.idx)
print(batch.positions)

# %%
# Here are `prefill and decode <1_why_cache.ipynb>`_ in a form in which mistakes can be planted: ``read`` is prefill, and
# returns the logits (B, V) of the last column; ``speak`` calls it and goes on, one token for each row.


def read(model, prompts, place=lambda batch: batch.positions):
    batch = padded_batch(prompts, pad_token_id=end, side="left")
    positions = place(batch)
    cache = GrowingCache(model.config.n_layer)
    logits = prefill(model, batch.idx, cache, positions=positions)  # (B, V)
    return logits, positions[:, -1], cache


def speak(model, start, prompts, n, choose=lambda logits: logits.argmax(-1)):
    logits, last, cache = start(model, prompts)
    said, scores = [], []
    for step in range(n):
        if step > 0:
            last = last + 1
            logits = decode(model, said[-1], cache, positions=last)
        scores.append(logits)
        said.append(choose(logits))
    return torch.stack(said, 1), torch.stack(scores, 1)  # (B, n), (B, n, V)


prompts = ["Raise an", "The default value is", "If the file does not exist, an"]
prompts = [tokenizer.start(text) for text in prompts]
said, _ = speak(model, read, prompts, 12)
assert said.tolist() == complete(generate(model, prompts, 12, GREEDY))

# %%
# Six causes in the model
# -----------------------
#
# Three causes are wrong positions for the prompts. Padding may be **attended**, like any token: the position of each is
# its column. Or it is hidden but **counted**, so that a text still starts at its column instead of 0. Or it is **masked
# by id**, and the text contains that id too: with end-of-text as padding, every document loses its first token.


def attended(batch):
    return torch.arange(batch.idx.shape[1]).expand_as(batch.idx)


def counted(batch):
    return attended(batch).where(batch.positions >= 0, PADDING)


def masked_by_id(batch):
    return positions_from_mask((batch.idx != end).long())


# %%
# The fourth is to read the **pad column**. Padding on the right needs no mask while the prompts are read, as no real
# token comes after it; but the last column of a short row is padding. Here the cache then forgets the padding with
# ``crop``, so that nothing else is wrong.


def pad_column(model, prompts):
    batch = padded_batch(prompts, pad_token_id=end, side="right")
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    cache = GrowingCache(model.config.n_layer)
    logits = model(batch.idx, cache=cache)[:, -1]
    cache.crop(lengths)
    return logits, lengths - 1, cache


# %%
# Two causes come after the prompts. A mask for the **first pass only** leaves the keys of the padding in the cache,
# where every later token sees them. And the prompts may be counted without padding, the new tokens with it: **two
# counts** in one row.


def first_pass_only(model, prompts):
    logits, last, cache = read(model, prompts)
    cache.tracks[0].positions.clamp_(min=0)
    return logits, last, cache


def two_counts(model, prompts):
    logits, last, cache = read(model, prompts)
    return logits, last.max().expand_as(last), cache


starts = {
    "correct": read,
    "attended": partial(read, place=attended),
    "counted": partial(read, place=counted),
    "masked by id": partial(read, place=masked_by_id),
    "pad column": pad_column,
    "first pass only": first_pass_only,
    "two counts": two_counts,
}

# %%
# The first measurement is the largest error of a logit, in float64. Two small models have random weights that are large
# enough to show every mistake. All runs are fed the same tokens. The reference is each row alone, without padding and
# without a cache.


def random_model(config):
    model = build(config).eval()
    randomize_(model)
    return model.double()


sizes = dict(vocab_size=97, block_size=64, n_layer=3, n_head=4)
sizes |= dict(eos_token_id=None, bos_token_id=None)
qwen2 = sizes | dict(n_embd=40, n_kv_head=2, intermediate_size=56)
tiny = {
    "GPT-2": random_model(GPT2Config(**sizes, n_embd=36)),
    "Qwen2": random_model(Qwen2Config(**qwen2)),
}
generator = torch.Generator().manual_seed(0)
few = [torch.randint(1, 97, (n,), generator=generator) for n in (4, 9, 17)]
few = [[end, *ids.tolist()] for ids in few]
fed = torch.randint(1, 97, (3, 2), generator=generator)


def logit_errors(model, start):
    feed = iter(fed.T)
    _, got = speak(model, start, few, 2, lambda logits: next(feed))
    for row, prompt in enumerate(few):
        for step in range(2):
            ids = torch.tensor([prompt + fed[row, :step].tolist()])
            got[row, step] -= model(ids)[0, -1]
    return got.abs().amax((0, 2)).tolist()  # by step


errors = {}
print(f"{'':16}{'GPT-2':>12}{'':10}{'Qwen2':>12}")
print(f"{'':16}{'prompt':>10}{'next':>10}{'prompt':>12}{'next':>10}")
for name, start in starts.items():
    errors[name] = [logit_errors(m, start) for m in tiny.values()]
    (a, b), (c, d) = errors[name]
    print(f"{name:16}{a:10.0e}{b:10.0e}{c:12.0e}{d:10.0e}")

# %%
# *Prompt* is the logits of the last real token, *next* those of the token after it. Look at where the errors are not.
#
# * Two causes leave the first token right. A test that generates one token does not see them.
# * The pad column ruins the first token and nothing else, if the right token is fed after it.
# * Qwen2 knows distances alone, so counting the padding does nothing to it. Two counts in one row change the distances,
#   and then the rotation does not help.

for name in ("first pass only", "two counts"):
    for prompt, after in errors[name]:
        assert prompt < 1e-12 and after > 1
for prompt, after in errors["pad column"]:
    assert prompt > 1 and after < 1e-12
for name in ("attended", "masked by id"):
    assert min(min(pair) for pair in errors[name]) > 1
in_gpt2, in_qwen2 = errors["counted"]
assert min(in_gpt2) > 1 and max(in_qwen2) < 1e-12
assert max(max(pair) for pair in errors["correct"]) < 1e-12

# %%
# The second measurement is on the two shipped models: the share of greedy tokens that change. Texts that the model
# wrote itself are cut after 3 to 24 tokens, and ten such prompts are one batch. Only rows with padding count. The models
# run in float64, so that rounding plays no part.

shipped = {"GPT-2": model, "Qwen2": load_shipped("qwen2-docs")[0]}
exact = {name: copy.deepcopy(m).double() for name, m in shipped.items()}
sampler = Sampler(top_p=0.95)
texts = generate(model, [[end]], 24, sampler, num_return_sequences=24)
texts = complete(texts)
cuts = torch.randint(3, 25, (24,), generator=generator).tolist()
prompts = [[end, *text[:cut]] for text, cut in zip(texts, cuts)][:10]
padded = [len(p) < max(len(p) for p in prompts) for p in prompts]

changed = {}
for kind, m in exact.items():
    alone = [complete(generate(m, [p], 10, GREEDY))[0] for p in prompts]
    alone = torch.tensor(alone)[padded]
    for name, start in starts.items():
        tokens, _ = speak(m, start, prompts, 10)
        changed[name, kind] = (tokens[padded] != alone).double().mean().item()

_, (ax,) = figure(6.4, 3.8)
causes = [name for name in starts if name != "correct"]
for i, (kind, hatch) in enumerate({"GPT-2": "", "Qwen2": "//"}.items()):
    share = [100 * changed[name, kind] for name in causes]
    where = [y + 0.38 * i for y in range(len(causes))]
    bars = ax.barh(
        where, share, 0.36, color=COLOURS[i], hatch=hatch, label=kind
    )
    ax.bar_label(bars, fmt="%.0f", padding=3)
ax.set_yticks([y + 0.19 for y in range(len(causes))], causes)
ax.invert_yaxis()
ax.set(xlim=(0, 120), xticks=range(0, 101, 20))
ax.set_xlabel("greedy tokens that change (%)")
ax.set_title("What each cause does to padded rows")
ax.legend(frameon=False, loc="upper right")
plt.show()

for (name, kind), share in changed.items():
    harmless = name == "correct" or (name, kind) == ("counted", "Qwen2")
    assert (share == 0) == harmless
    assert share > 0.5 or name != "pad column"

# %%
# The correct program changes no token, and neither does counting in Qwen2. Everything else changes some, and the pad
# column changes the most.
#
# A cause outside the model
# -------------------------
#
# A repetition penalty lowers the logits of the tokens that a row contains. If it looks at the padded row, it finds the
# padding there. With end-of-text as padding, the *end of the text* becomes unlikely. The next prompts have no
# end-of-text in front, so that they hold none of their own.

middle = [text[:cut] for text, cut in zip(texts, cuts)]
middle = [prompt for prompt in middle if end not in prompt][:10]
penalty = Sampler(temperature=0.0, repetition_penalty=1.3)
with_padding = padded_batch(middle, pad_token_id=end, side="left").idx.tolist()


def until_end(tokens):
    rows = [[*row, end] for row in tokens.tolist()]
    return [row[: row.index(end)] for row in rows]


for kind, m in exact.items():
    said = []
    for rows in (middle, with_padding):  # what the penalty looks at
        choose = Chooser(rows, penalty)
        said.append(until_end(speak(m, read, middle, 30, choose)[0]))
    longer = sum(len(b) > len(a) for a, b in zip(*said))
    print(f"{kind}: {longer} of {len(middle)} texts go on after their end")
    assert longer >= 2
    assert all(b[: len(a)] == a for a, b in zip(*said))

# %%
# Up to the place where they should have ended, the texts are the same. In the package the penalty is given the prompts
# themselves, and no padding is among them.
#
# What rounding can still change
# ------------------------------
#
# A larger matrix product may add its terms in another order, and then the errors of batch and row differ. Where two
# tokens are nearly equally likely, that can decide. Qwen2 writes 10 greedy texts of 10 tokens. How many differ between
# *batch* and row alone, and how many differ between the row alone in this *dtype* and in float64? The *gap* is how far
# apart the two best logits are at the first difference between batch and row, and *median* is that of all steps.

many = [[end, *text[:cut]] for text, cut in zip(texts, cuts)][:10]
truth, _ = speak(exact["Qwen2"], read, many, 10)
print(f"{'':8}{'batch':>8}{'dtype':>8}{'largest gap':>14}{'median':>9}")
for dtype in (torch.float32, torch.bfloat16):
    m = copy.deepcopy(shipped["Qwen2"]).to(dtype)
    together, _ = speak(m, read, many, 10)
    alone = [speak(m, read, [prompt], 10) for prompt in many]
    said = torch.cat([tokens for tokens, _ in alone])
    best = torch.cat([logits for _, logits in alone]).topk(2).values
    gap = (best[..., 0] - best[..., 1]).float()  # (B, n)
    other = said != together
    rows = other.any(1)
    ties = gap[rows, other.long().argmax(1)[rows]]  # at the first difference
    largest = f"{ties.max():.3f}" if len(ties) else "-"
    rounded = (said != truth).any(1).sum()
    name = str(dtype).removeprefix("torch.")
    print(f"{name:8}{len(ties):8}{rounded:8}{largest:>14}{gap.median():9.2f}")
    assert ties.le(gap.median() / 3).all() and len(ties) < 8

# %%
# Every text that changed did so at a near tie, whose gap is less than a third of the median. Rounding to bfloat16
# changes texts without any batch. If a batch in bfloat16 says something else than a row alone, compare in float64
# before you look for a mistake in the mask.
#
# Bug museum
# ----------
#
# A forward pass that counts padding
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# ``generate`` of ``transformers`` makes positions from the mask; the forward pass of its GPT-2 does not. If you score
# texts with the mask alone, you get the cause that is called *counted* above. These are errors of the last column's
# logits. (G5)

load = transformers.AutoModelForCausalLM.from_pretrained
theirs = {}
for kind, name in {"GPT-2": "gpt2-docs", "Qwen2": "qwen2-docs"}.items():
    theirs[kind] = load(PRETRAINED / name, dtype=torch.float32).eval()

batch = padded_batch(prompts, end, side="left")
given = dict(attention_mask=(batch.positions >= 0).long())
short = batch.positions[:, 0] < 0
places = dict(position_ids=batch.positions.clamp(min=0))
print(f"{'':8}{'mask alone':>12}{'with position_ids':>20}")
options = dict(do_sample=False, pad_token_id=end, max_new_tokens=10)
for kind, library in theirs.items():
    truth = exact[kind](batch.idx, positions=batch.positions)[short, -1]
    wrong = (library(batch.idx, **given).logits[short, -1] - truth).abs().max()
    fixed = library(batch.idx, **given, **places).logits[short, -1] - truth
    print(f"{kind:8}{wrong:12.0e}{fixed.abs().max():20.0e}")
    assert fixed.abs().max() < 1e-3
    assert wrong > 1 if kind == "GPT-2" else wrong < 1e-3
    texts_ = library.generate(batch.idx, **given, **options, eos_token_id=None)
    ours = complete(generate(shipped[kind], prompts, 10, GREEDY))
    assert texts_[:, batch.idx.shape[1] :].tolist() == ours

# %%
# The fixed line passes ``position_ids``; ``generate`` does it itself, and writes the same tokens as ours. The check that finds the mistake is a padded row against the same row alone,
# in a model with learned positions; Qwen2 lets it pass.
#
# The penalty of row 0
# ~~~~~~~~~~~~~~~~~~~~
#
# A program took the tokens to penalise from row 0 and applied them to every row. Shapes broadcast, so no error is
# raised. (G10)


class PenaltyOfRow0(Sampler):
    def __call__(self, logits, seen, u):
        return super().__call__(logits, seen[:1].expand_as(seen), u)


wrong_rule = PenaltyOfRow0(temperature=0.0, repetition_penalty=1.3)
for rows in (prompts, prompts[::-1]):
    wrong = complete(generate(exact["GPT-2"], rows, 16, wrong_rule))
    right = complete(generate(exact["GPT-2"], rows, 16, penalty))
    same = [a == b for a, b in zip(wrong, right)]
    print(f"row 0 right: {same[0]}, wrong rows: {same.count(False)} of 10")
    assert same[0] and same.count(False) >= 5

# %%
# Row 0 is right in either order, and at least half of all rows are wrong. The fixed line is ``seen``: one row of marks
# for each row of logits. A test with one prompt does not find the mistake. Two different rows do, each compared with the
# same row alone.
#
# Exercises
# ---------
#
# 1. *Easy.* Give ``logit_errors`` three prompts of *equal* length. Which causes does it still see? Hint: ``few`` is a
#    global name. A good answer names one cause, and says why such a test is not enough.
#
# Summary
# -------
#
# * In GPT-2, six planted causes and one in the penalty each changed the texts of short rows; two of the six left the
#   first token right.
# * Counting the padding moved a logit of GPT-2 by more than 1, and those of Qwen2 by rounding alone. Two counts in one
#   row moved both.
# * The forward pass of GPT-2 in ``transformers`` needs ``position_ids``; its ``generate`` makes them.
# * Rounding can flip near ties. All texts that changed between batch and row did so at one.
#
# Sources
# -------
#
# Each of these threads is about one of the causes:
#
# * rounding: `logits differ in a batch in bfloat16 <https://github.com/huggingface/transformers/issues/26869>`_.
# * counted, G5: `logits of generate and of forward differ <https://github.com/huggingface/transformers/issues/18388>`_.
# * attended, and the pad column: `a mask for inference <https://github.com/karpathy/nanoGPT/issues/253>`_, in nanoGPT.
# * first pass only: `the mask in all decoding steps <https://github.com/OpenNMT/OpenNMT-py/pull/2532>`_, in OpenNMT-py.
# * positions shared by all rows, in models with rotation: `left padding gives wrong output <https://github.com/unslothai/unsloth/issues/3699>`_, in unsloth.
# * masked by id: `end-of-text as padding in dialogues <https://github.com/locuslab/open-unlearning/issues/128>`_, in open-unlearning.
# * the penalty: `no penalty on padding tokens <https://github.com/huggingface/text-generation-inference/pull/1765>`_, in text-generation-inference.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
