r"""
A label for every token, in depth
=================================

The lesson on `labels for tokens <2_tokens.ipynb>`_ coloured Python programs. What is lost between characters and tokens?
How strong are tables and frozen states as baselines, with intervals? How much is one token of waiting worth? And does the head equal ``Qwen2ForTokenClassification`` of transformers?

Exact labels
------------

There are K = 7 labels. Six of them are the kinds of ``tokenize``. The seventh, ``call``, is a name with an opening
bracket after it: what is called or defined.
"""

# sphinx_gallery_words = ["AutoModelForTokenClassification", "ignore_index", "align labels with tokens", "imbalanced labels"]

import ast
import collections
import copy
import io
import keyword
import random
import token
import tokenize

import torch
import torch.nn.functional as F
import transformers

from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.checkpoint.configs import config_from_dict
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.models.heads import TokenClassifier
from lm_from_scratch.models.qwen2 import Qwen2Model
from lm_from_scratch.models.randomize import randomize_
from lm_from_scratch.optim.choose import parameter_groups
from lm_from_scratch.text.batch import padded_batch
from lm_from_scratch.text.corpora import source, split
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training.classification_loss import (
    token_classification_loss,
)
from lm_from_scratch.training.train import Schedule, learning_rate

LABELS = ["keyword", "name", "call", "number", "string", "comment", "operator"]
K = len(LABELS)
KINDS = {"NUMBER": "number", "COMMENT": "comment", "OP": "operator"}


def kind_of(part):
    kind = token.tok_name[part.type]
    if kind == "NAME":
        return "keyword" if keyword.iskeyword(part.string) else "name"
    return "string" if "STRING" in kind else KINDS.get(kind)


def spans(text):
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    found = []
    for part in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = kind_of(part)
        if kind is None:
            continue  # line ends and indentation
        if part.string == "(" and found and found[-1][2] == "name":
            found[-1] = (*found[-1][:2], "call")
        (row, column), (last_row, last_column) = part.start, part.end
        start, end = (
            starts[row - 1] + column,
            starts[last_row - 1] + last_column,
        )
        found.append((start, end, kind))
    return found


program = 'def area(r):\n    return 3.14 * abs(r) ** 2  # not "pi"\n'
for start, end, kind in spans(program):
    print(f"{kind}:{program[start:end]}", end="  ")
print()
assert [kind for _, _, kind in spans(program)].count("call") == 2

# %%
# Python 3.12 and later cut an f-string into parts, and the names inside it are names. Before that it is one string. So
# counts differ between versions of Python, and this page prints them.
#
# From characters to tokens
# -------------------------
#
# The tokenizer's backend says which characters each token covers. A token gets the label of its first character that
# has one; a token of blanks alone gets -100, the label that does not count.

model, tokenizer = load_shipped("qwen2-docs")
END = tokenizer.eos_token_id
V = tokenizer.vocab_size
T = 64


def label_tokens(text):
    of_character = [None] * len(text)
    for start, end, kind in spans(text):
        of_character[start:end] = [LABELS.index(kind)] * (end - start)
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    inside = [
        [k for k, c in zip(of_character[a:b], text[a:b]) if not c.isspace()]
        for a, b in encoding.offsets
    ]
    return encoding.ids, [[k for k in part if k is not None] for part in inside]


ids, inside = label_tokens(program)
assert ids == tokenizer.encode(program)
for piece, part in zip(tokenizer.pieces(ids), inside):
    print(f"{piece!r}:{LABELS[part[0]] if part else '-'}", end="  ")
print()

# %%
# A token may cover characters of two labels. How often that happens is counted below, on real programs.
#
# Functions and classes of the standard library
# ---------------------------------------------
#
# Each function or class at the top level of a module is a program of its own. It is read from its first character, so
# the model always knows whether a string is open. Long ones are cut after T = 64 tokens.
#
# The sides are those of the model's training. On the test side are the modules whose docstrings the model never read.

corpus = source()
known, held_out = (
    {document.name for document in side} for side in split(corpus, 0.05)
)


def pieces(document):
    lines = document.text.split("\n")
    for node in ast.parse(document.text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield "\n".join(lines[node.lineno - 1 : node.end_lineno]) + "\n"


chance = random.Random(0)
by_side = []
for side, modules, most in ((known, 90, 300), (held_out, 50, 130)):
    chosen = [document for document in corpus if document.name in side]
    chosen = chance.sample(chosen, min(modules, len(chosen)))
    texts = sorted({piece for document in chosen for piece in pieces(document)})
    by_side.append(chance.sample(texts, min(most, len(texts))))
train_texts = by_side[0]
test_texts = [text for text in by_side[1] if text not in set(train_texts)]

tally = collections.Counter()
mixed = collections.Counter()


def example(text):
    ids, inside = label_tokens(text)
    for piece, part in zip(ids[: T - 1], inside):
        tally["tokens"] += 1
        tally["blank"] += not part
        if len(set(part)) > 1:
            tally["two labels"] += 1
            mixed[tokenizer.decode([piece])] += 1
    labels = [part[0] if part else IGNORE for part in inside]
    return [END, *ids][:T], [IGNORE, *labels][:T]


train = [example(text) for text in train_texts]
test = [example(text) for text in test_texts]
for name, count in tally.items():
    print(f"{name:11}{count:7}  {count / tally['tokens']:6.1%}")
print("most frequent with two labels:", [p for p, _ in mixed.most_common(6)])
assert tally["two labels"] < 0.05 * tally["tokens"]
assert not any(c.isalnum() for piece in mixed for c in piece)

# %%
# Fewer than one token in twenty covers two labels. It always consists of marks, because the tokenizer keeps letters and
# marks apart, and an underscore is a mark to it. The label is right for the first part of such a token only.


def flat(examples, which):
    return torch.cat([torch.tensor(pair[which]) for pair in examples])


x_train, y_train = flat(train, 0), flat(train, 1)
x_test, y_test = flat(test, 0), flat(test, 1)
counted = y_test != IGNORE
print(f"{'':9}  train   test")
for k, label in enumerate(LABELS):
    row = int((y_train == k).sum()), int((y_test == k).sum())
    print(f"{label:9}{row[0]:7}{row[1]:7}")
    assert min(row) >= 20
print(f"{len(train)} pieces for training, {len(test)} for the test")

# %%
# Baselines first
# ---------------
#
# Accuracy alone rewards a model that knows strings, the most frequent label. So the mean over classes of F1 is beside
# it, with :math:`P_k` right answers of class k, :math:`A_k` answers and :math:`N_k` tokens:
#
# .. math::
#
#    F_1 = \frac{1}{K} \sum_k \frac{2 P_k}{A_k + N_k}
#
# Tokens of one piece are not independent, so the interval comes from drawing whole pieces again, a thousand times.

piece_of = torch.repeat_interleave(
    torch.arange(len(test)), torch.tensor([len(ids) for ids, _ in test])
)
generator = torch.Generator().manual_seed(0)
redrawn = torch.randint(len(test), (1000, len(test)), generator=generator)
answers = {}


def confusion(guess):
    matrix = torch.zeros(K, K)
    places = y_test[counted], guess[counted]
    ones = torch.ones(int(counted.sum()))
    return matrix.index_put_(places, ones, accumulate=True)  # (truth, answer)


def macro_f1(matrix):
    return (2 * matrix.diag() / (matrix.sum(0) + matrix.sum(1))).mean().item()


def accuracy(guess):
    return (guess == y_test)[counted].float().mean().item()


def report(name, guess):
    answers[name] = guess
    right = torch.zeros(len(test))
    right.index_add_(0, piece_of, ((guess == y_test) & counted).float())
    total = torch.zeros(len(test)).index_add_(0, piece_of, counted.float())
    again = right[redrawn].sum(1) / total[redrawn].sum(1)
    low, high = again.quantile(torch.tensor([0.025, 0.975])).tolist()
    line = f"{name:20}{accuracy(guess):6.1%}  ({low:.1%} to {high:.1%})"
    print(f"{line}  F1 {macro_f1(confusion(guess)):.2f}")


# %%
# The baselines are the most frequent label, the most frequent label of each token, and the most frequent label of each
# pair of a token and the one before it. Where a pair is unknown, the token decides; where a token is unknown, the most
# frequent label does.

real = y_train != IGNORE
usual = y_train[real].mode().values
assert LABELS[usual] == "string"
report("most frequent label", torch.full_like(y_test, usual))

table = torch.zeros(V, K)
ones = torch.ones(int(real.sum()))
table.index_put_((x_train[real], y_train[real]), ones, accumulate=True)
of_token = torch.where(table.sum(1) > 0, table.argmax(1), usual)  # (V,)
report("table of tokens", of_token[x_test])

pairs = collections.defaultdict(collections.Counter)
for ids, labels in train:
    for place in range(1, len(ids)):
        if labels[place] != IGNORE:
            pairs[ids[place - 1], ids[place]][labels[place]] += 1
guess = of_token[x_test].tolist()
for place in range(1, len(guess)):
    if y_test[place] != IGNORE:  # then a token of its piece is before it
        seen = pairs.get((int(x_test[place - 1]), int(x_test[place])))
        guess[place] = seen.most_common(1)[0][0] if seen else guess[place]
report("table of pairs", torch.tensor(guess))

rate = {name: accuracy(guess) for name, guess in answers.items()}
assert rate["table of tokens"] > rate["most frequent label"]
assert rate["table of pairs"] > rate["table of tokens"]
assert rate["table of pairs"] < 0.85

# %%
# A frozen backbone
# -----------------
#
# A ``TokenClassifier`` is a backbone, dropout, and a linear map with a bias, applied to the state of every token. With
# a frozen backbone the states are computed once, and training the map is a convex problem.


@torch.no_grad()
def states_of(backbone, examples):
    states = []
    for start in range(0, len(examples), 16):
        batch = padded_batch([ids for ids, _ in examples[start:][:16]], END)
        x = backbone(batch.idx, positions=batch.positions)
        states.append(x[batch.positions >= 0])  # row by row, without padding
    return torch.cat(states)  # (N, C)


def linear_probe(states, y, decay=1e-4):
    states, y = states[y != IGNORE], y[y != IGNORE]
    head = torch.nn.Linear(states.shape[1], K)
    solver = torch.optim.LBFGS(
        head.parameters(), max_iter=25, line_search_fn="strong_wolfe"
    )

    def loss():
        solver.zero_grad()
        loss = F.cross_entropy(head(states), y)
        loss = loss + decay * head.weight.square().sum()
        loss.backward()
        return loss

    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    solver.step(loss)
    return head.requires_grad_(False)


states_train = states_of(model.backbone, train)
states_test = states_of(model.backbone, test)
probe = linear_probe(states_train, y_train)
report("frozen", probe(states_test).argmax(1))
rate["frozen"] = accuracy(answers["frozen"])
assert rate["frozen"] > rate["table of tokens"] + 0.03

# %%
# Fine-tuning
# -----------
#
# The loop is that of `the page on labels for texts <1a_sequences_in_depth.ipynb>`_, with one more argument: the loss gets
# the positions, because padding has no label. One pass over the pieces trains the shipped Qwen2.


def padded_labels(examples, width):
    rows = [labels + [IGNORE] * (width - len(labels)) for _, labels in examples]
    return torch.tensor(rows)


def fine_tune(classifier, examples, seed=0):
    order = random.Random(seed).sample(examples, len(examples))
    batches = [order[i : i + 8] for i in range(0, len(order), 8)]
    config = Schedule(steps=len(batches), lr=2e-3, warmup=10)
    groups = parameter_groups(classifier, weight_decay=0.01)
    optimizer = torch.optim.AdamW(groups, fused=True)
    torch.manual_seed(seed)
    for step, chosen in enumerate(batches, start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        batch = padded_batch([ids for ids, _ in chosen], END)
        y = padded_labels(chosen, batch.idx.shape[1])
        logits = classifier.train()(batch.idx, positions=batch.positions)
        loss = token_classification_loss(logits, y, positions=batch.positions)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(classifier.parameters(), 1.0)
        optimizer.step()


torch.manual_seed(0)
classifier = TokenClassifier(copy.deepcopy(model.backbone), K)
fine_tune(classifier, train)
states = states_of(classifier.eval().backbone, test)
with torch.no_grad():
    report("fine-tuned", classifier.classify(states).argmax(1))
rate["fine-tuned"] = accuracy(answers["fine-tuned"])
assert rate["fine-tuned"] > rate["frozen"] + 0.05
assert rate["fine-tuned"] > rate["table of pairs"] + 0.15
assert macro_f1(confusion(answers["fine-tuned"])) > 0.7

# %%
# What comes after is unknown
# ---------------------------
#
# As in the lesson: the bracket that makes a name a call comes after the name, so a causal model gives both the same
# logits.

with_bracket = tokenizer.encode("x = float(y)\n")
without = tokenizer.encode("x = float + y\n")
place = 1 + tokenizer.pieces(without).index(" float")
assert with_bracket[:place] == without[:place]
with torch.no_grad():
    a = classifier(torch.tensor([[END, *with_bracket]]))[0, place]
    b = classifier(torch.tensor([[END, *without]]))[0, place]
torch.testing.assert_close(a, b, atol=1e-4, rtol=0.0)
share = a.softmax(-1)
print({LABELS[k]: f"{share[k]:.0%}" for k in range(K) if share[k] > 0.005})

# %%
# The model bets. A reader that waits for one more token does not have to. So train two probes on the frozen states: one
# reads the state of the token, the other reads the next state as well.
#
# Only names and calls count here, at their last token, which is the one that the bracket follows.


def last_of_names(x, y):
    name = (y == LABELS.index("name")) | (y == LABELS.index("call"))
    last = (y != y.roll(-1)) & (x.roll(-1) != END)  # END begins a piece
    return y.masked_fill(~(name & last), IGNORE)


asked, wanted = last_of_names(x_train, y_train), last_of_names(x_test, y_test)
decided = wanted != IGNORE
bet = {}
for name, look in (("token", 0), ("token and next", 1)):
    reach = [
        torch.cat([states, states.roll(-1, 0)], 1) if look else states
        for states in (states_train, states_test)
    ]
    guess = linear_probe(reach[0], asked)(reach[1]).argmax(1)
    bet[name] = (guess == wanted)[decided].float().mean().item()
    print(f"reads the {name:15}{bet[name]:6.1%} of {int(decided.sum())} names")
shares = torch.bincount(wanted[decided], minlength=K) / decided.sum()
print(f"always the more frequent one {shares.max():.1%}")
assert bet["token and next"] > bet["token"] + 0.05
assert bet["token and next"] > 0.98

# %%
# One token of patience is worth more than five points, and leaves fewer than one mistake in fifty names. A better causal model
# would bet better, but it would still bet: what decides is not in the text that it has read so far. It is one reason why
# taggers read a sentence from both sides.
#
# The same as transformers
# ------------------------
#
# The oracle is a small ``Qwen2ForTokenClassification`` with large weights. Its tensors have the names of ours.

config = transformers.Qwen2Config(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=112,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=2,
    eos_token_id=2,
    pad_token_id=0,
    num_labels=K,
)
oracle = transformers.Qwen2ForTokenClassification(config).eval()
randomize_(oracle)
generator = torch.Generator().manual_seed(0)

tiny = TokenClassifier(Qwen2Model(config_from_dict(config.to_dict())), K).eval()
print(tiny.load_state_dict(oracle.state_dict(), strict=True))

# %%
# Rows of 9, 6 and 4 tokens are in a batch with padding on both sides. Logits are compared at real tokens. Losses and the
# gradients of all parameters agree if the padding is labelled -100 for the oracle.

mask = [[1] * 9, [0] + [1] * 6 + [0] * 2, [0] * 3 + [1] * 4 + [0] * 2]
mask = torch.tensor(mask)
positions, padding = positions_from_mask(mask), mask == 0
ids = torch.randint(3, 97, (3, 9), generator=generator)
ids = ids.masked_fill(padding, 0)
y = torch.randint(K, (3, 9), generator=generator)

theirs = oracle(ids, attention_mask=mask, labels=y.masked_fill(padding, IGNORE))
ours = tiny(ids, positions=positions)
loss = token_classification_loss(ours, y, positions=positions)
close = dict(atol=5e-5, rtol=0.0)
torch.testing.assert_close(ours[~padding], theirs.logits[~padding], **close)
torch.testing.assert_close(loss, theirs.loss, **close)
loss.backward()
theirs.loss.backward()
for key, parameter in oracle.named_parameters():
    gradient = tiny.get_parameter(key).grad
    torch.testing.assert_close(gradient, parameter.grad, atol=1e-4, rtol=1e-4)
print(f"loss {loss.item():.4f} and {theirs.loss.item():.4f}")

# %%
# One difference is on purpose. Our loss leaves padding out whatever its label is; that of transformers counts every label
# that is not -100.

labelled = oracle(ids, attention_mask=mask, labels=y).loss.item()
print(f"real tokens {loss.item():.4f}, all labels {labelled:.4f}")
assert abs(labelled - loss.item()) > 0.02

# %%
# Bug museum
# ----------
#
# Padding in the loss
# ~~~~~~~~~~~~~~~~~~~
#
# The lesson tells the story: a tensor of labels begins as ``torch.zeros``, and padding says ``keyword``. (G7)
#
# Two probes are trained on the states of the 96 shortest pieces, padded to one length. The first gets such labels for
# its padding, the second ignores padding. Both are measured on the shorter half of the test pieces, each as its author
# would: the first over all columns with a label, the second over real tokens.


@torch.no_grad()
def padded_states(examples, n):
    examples = sorted(examples, key=lambda pair: len(pair[0]))[:n]
    batch = padded_batch([ids for ids, _ in examples], END)
    y = padded_labels(examples, batch.idx.shape[1])
    x = model.backbone(batch.idx, positions=batch.positions)
    return x.flatten(0, 1), y.flatten(), batch.positions.flatten() >= 0


x_96, y_96, real_96 = padded_states(train, 96)
x_all, y_all, real_all = padded_states(test, len(test) // 2)
share = (~real_all).sum() / ((y_all != IGNORE) | ~real_all).sum()
print(f"padding among the labels of the test: {share:.0%}")
reported, true = {}, {}
for kind in ("counted", "left out"):
    count = kind == "counted"
    y_fit = y_96.masked_fill(~real_96, 0) if count else y_96
    y_seen = y_all.masked_fill(~real_all, 0) if count else y_all
    head = linear_probe(x_96, y_fit)
    logits = head(x_all)
    right = (logits.argmax(1) == y_seen)[y_seen != IGNORE]
    reported[kind] = right.float().mean().item()
    right = (logits.argmax(1) == y_all)[y_all != IGNORE]
    true[kind] = right.float().mean().item()
    loss = F.cross_entropy(logits, y_seen, ignore_index=IGNORE).item()
    line = f"padding {kind:9} loss {loss:.2f}, reported {reported[kind]:.1%}"
    print(f"{line}, real tokens {true[kind]:.1%}")
assert reported["counted"] > true["counted"] + 0.03
assert abs(reported["left out"] - true["left out"]) < 1e-6

# %%
# The report is more than three points too good, because padding is easy. The fixed line reads the positions. The check
# gives the padding an impossible label, and demands the same loss.

odd = y.masked_fill(padding, 77)
torch.testing.assert_close(
    token_classification_loss(ours, odd, positions=positions),
    token_classification_loss(ours, y, positions=positions),
)

# %%
# A tuple cut at a fixed place
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The token classifier of an earlier transformers returned the logits and ``outputs[2:]`` of its backbone. With a cache,
# places 0 and 1 are the last states and the cache. Without one, place 1 holds what the caller asked for. (Q21)

sizes = {}
for use_cache in (True, False):
    asked_for = dict(output_hidden_states=True, return_dict=False)
    outputs = oracle.model(ids, use_cache=use_cache, **asked_for)
    result = (oracle.score(outputs[0]), *outputs[2:])
    sizes[use_cache] = len(result)
    print(
        f"use_cache={use_cache}: {len(outputs)} outputs, {len(result)} returned"
    )
assert sizes == {True: 2, False: 1}

# %%
# The hidden states vanish without an error. The fixed line selects by name, and the check asks with the cache off. In this
# package a model returns one tensor, and a recorder keeps the states.

from lm_from_scratch.instruments.record import record_hidden_states

named = oracle(ids, output_hidden_states=True, use_cache=False)
with torch.no_grad(), record_hidden_states(tiny) as recorded:
    tiny(ids)
print("by name:", len(named.hidden_states), "recorded:", len(recorded))
for place in range(3):
    theirs, ours = named.hidden_states[place], recorded[place][0]
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-5)
torch.testing.assert_close(recorded[-1][0], named.hidden_states[-1], **close)

# %%
# Exercises
# ---------
#
# 1. *Medium.* Weight the loss of each class by the inverse of its frequency. Hint: ``F.cross_entropy`` has ``weight``. A
#    good answer reports accuracy and F1 with and without, and says which of them the weights were for.
# 2. *Medium.* Cut the pieces at random tokens, so that a text may begin inside a string. Hint: keep the labels, drop the
#    first tokens. A good answer compares the first eight tokens of such pieces with those of whole ones.
# 3. *Hard.* Fine-tune with patience: at each token, predict the label of the token before. Hint: roll the labels by
#    one place and label the first with -100. A good answer finds more calls than this page, and says what the delay
#    costs in an editor.
#
# Summary
# -------
#
# * Labels of characters become labels of tokens by their offsets. Fewer than 5 % of the tokens covered two labels.
# * A table of tokens, and one of pairs, are the baselines to beat. A frozen backbone beat the first by more than 3
#   points; fine-tuning beat the second by more than 5.
# * What follows a token is unknown to a causal model. One token of patience was worth more than 5 points on names.
# * Loss and gradients equal ``Qwen2ForTokenClassification`` if its labels of padding are -100; ours skips padding always. A probe that
#   counts padding reported a rate that was more than 3 points too high.
#
# Sources
# -------
#
# * Python: `the tokenize module <https://docs.python.org/3/library/tokenize.html>`_. The exact labels.
# * Devlin et al.: `BERT <https://arxiv.org/abs/1810.04805>`_, 2018. Labels for tokens from a model that reads both sides.
# * Tjong Kim Sang, De Meulder: `The CoNLL-2003 shared task <https://arxiv.org/abs/cs/0306050>`_. The classic of token
#   classification, and why F1.
# * Efron: `Bootstrap Methods: Another Look at the Jackknife <https://doi.org/10.1214/aos/1176344552>`_, 1979. Drawing the
#   sample again.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
