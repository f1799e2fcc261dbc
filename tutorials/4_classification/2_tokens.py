r"""
A label for every token
=======================

An editor colours a program by the kind of each word: keyword, string, comment. This page trains a language model to do
the same, token by token.

Nobody needs a model for that, because Python's own ``tokenize`` does it without a mistake. This is the reason for the
choice: every label is exact and free, so every mistake of the model is a real one and can be explained.

You will learn
--------------

* how labels of characters become labels of byte-pair tokens, and what is lost on the way,
* how strong a table of single tokens is, and what context adds to it,
* what a causal model cannot know, shown in its mistakes,
* why padding must not count in a loss,
* how to equal ``Qwen2ForTokenClassification`` of transformers, and where to differ.

Before you start
----------------

Read the page before this one. Reading takes about half an hour. A CPU is enough, ``transformers`` must be installed (the
package's ``test`` extra brings it), and nothing is downloaded.

Letters name axes: B rows of a batch, T tokens, C features of a state, V entries of the vocabulary, K labels.

Exact labels
------------

There are K = 7 labels. Six of them are the kinds of ``tokenize``. The seventh, ``call``, is a name with an opening
bracket behind it: what is called or defined. It is here for a reason that a section below explains.
"""

import ast
import collections
import copy
import inspect
import io
import itertools
import keyword
import random
import token
import tokenize

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

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
        start, end = starts[row - 1] + column, starts[last_row - 1] + last_column
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
# The model reads byte-pair tokens, which know nothing of Python. The tokenizer's backend tells which characters each
# token covers. A token gets the label of its first character that has one; a token of blanks alone gets -100, the label
# that does not count.

from lm_from_scratch.checkpoint import load_shipped
from lm_from_scratch.loss import IGNORE

model, tokenizer = load_shipped("qwen2-docs")
END = tokenizer.eos_token_id
V = tokenizer.vocab_size
T = 128


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
# the model always knows whether a string is open. Long ones are cut after T = 128 tokens.
#
# The sides are those of the model's training. On the test side are the modules whose docstrings the model never read.

from lm_from_scratch.data import padded_batch, source, split

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
for side, modules, most in ((known, 90, 360), (held_out, 50, 130)):
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

# %%
# Fewer than one token in twenty covers two labels, mostly a bracket with the quote of a string. Its label is right for
# its first half only. A label for each character would need a model that reads characters.


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
# Accuracy alone would reward a model that knows strings, which are most of the tokens. So the mean over classes of F1
# stands beside it, with :math:`P_k` right answers of class k, :math:`A_k` answers and :math:`N_k` tokens:
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
    if y_test[place] != IGNORE:  # then a token of its piece stands before it
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
# A ``TokenClassifier`` is a backbone, dropout, and a linear map with a bias, applied to the state of every token.

from lm_from_scratch.heads import TokenClassifier, token_classification_loss

print(inspect.getsource(TokenClassifier.classify))

# %%
# With a frozen backbone the states are computed once, and training the map is a convex problem.


@torch.no_grad()
def states_of(backbone, examples):
    states = []
    for start in range(0, len(examples), 16):
        batch = padded_batch([ids for ids, _ in examples[start:][:16]], END)
        x = backbone(batch.idx, batch.positions)
        states.append(x[batch.positions >= 0])  # row by row, without padding
    return torch.cat(states)  # (N, C)


def linear_probe(states, y, decay=1e-4):
    states, y = states[y != IGNORE], y[y != IGNORE]
    head = torch.nn.Linear(states.shape[1], K)
    solver = torch.optim.LBFGS(
        head.parameters(), max_iter=40, line_search_fn="strong_wolfe"
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
# The loop is that of the page before, with one more argument: the loss gets the positions, because padding has no
# label. One pass over the pieces trains the shipped Qwen2, and as many steps train the same architecture from random
# weights.

from lm_from_scratch.train import TrainConfig, learning_rate, parameter_groups


def padded_labels(examples, width):
    rows = [labels + [IGNORE] * (width - len(labels)) for _, labels in examples]
    return torch.tensor(rows)


def fine_tune(classifier, examples, seed=0):
    order = random.Random(seed).sample(examples, len(examples))
    batches = [order[i : i + 8] for i in range(0, len(order), 8)]
    config = TrainConfig(steps=len(batches), lr=1e-3, warmup=10)
    groups = parameter_groups(classifier, weight_decay=0.01)
    optimizer = torch.optim.AdamW(groups, fused=True)
    torch.manual_seed(seed)
    losses = []
    for step, chosen in enumerate(batches, start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        batch = padded_batch([ids for ids, _ in chosen], END)
        y = padded_labels(chosen, batch.idx.shape[1])
        logits = classifier.train()(batch.idx, batch.positions)
        loss = token_classification_loss(logits, y, batch.positions)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(classifier.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
untrained = type(model)(model.config)
losses = {}
for name, start in (("from random weights", untrained), ("fine-tuned", model)):
    torch.manual_seed(0)
    classifier = TokenClassifier(copy.deepcopy(start.backbone), K)
    losses[name] = fine_tune(classifier, train)
    states = states_of(classifier.eval().backbone, test)
    with torch.no_grad():
        report(name, classifier.classify(states).argmax(1))
    rate[name] = accuracy(answers[name])

print(f"{len(losses[name])} steps, {len(x_train)} tokens")
assert rate["fine-tuned"] > rate["frozen"] + 0.02
assert rate["fine-tuned"] > rate["table of pairs"] + 0.05
assert rate["fine-tuned"] > rate["from random weights"] + 0.05

# %%
# Both losses start at the logarithm of seven.

from lm_from_scratch.plot import COLOURS, curves, figure, printable

series = {
    name: (list(range(1, len(values) + 1)), values)
    for name, values in losses.items()
}
level = {"log 7": torch.tensor(7.0).log().item()}
made = curves(series, "step", "loss", level)
made.axes[0].lines[1].set_linestyle("-.")
made.axes[0].legend(frameon=False)
made.axes[0].set_title("training loss, 8 pieces for a step")
plt.show()
assert all(abs(values[0] - level["log 7"]) < 0.5 for values in losses.values())

# %%
# Where the answers go
# --------------------
#
# For each class: the share of its tokens that each method finds. Accuracy does not show that a method ignores a rare
# class, but this table does.

names = ["table of tokens", "frozen", "from random weights", "fine-tuned"]
print(f"{'':9}" + "".join(f"{name.split()[-1]:>10}" for name in names))
found = {}
for name in names:
    matrix = confusion(answers[name])
    found[name] = matrix.diag() / matrix.sum(1)
for k, label in enumerate(LABELS):
    values = "".join(f"{found[name][k]:10.0%}" for name in names)
    print(f"{label:9}{values}")
assert macro_f1(confusion(answers["fine-tuned"])) > 0.7

# %%
# Row k of the matrix shows where the tokens of class k went, in per cent of the row.

# sphinx_gallery_thumbnail_number = 2
matrix = confusion(answers["fine-tuned"])
percent = 100 * matrix / matrix.sum(1, keepdim=True)
made, (ax,) = figure(5.2, 4.8)
ax.imshow(percent.numpy(), cmap="Blues", vmin=0, vmax=100)
for i, j in itertools.product(range(K), range(K)):
    if percent[i, j] >= 0.5:
        colour = "white" if percent[i, j] > 50 else "black"
        text = f"{percent[i, j]:.0f}"
        ax.text(j, i, text, ha="center", va="center", color=colour)
ax.set_xticks(range(K), LABELS, rotation=45, ha="right")
ax.set_yticks(range(K), LABELS)
ax.grid(False)
ax.set(xlabel="answer", ylabel="label", title="confusion, fine-tuned")
plt.show()

off = matrix - matrix.diag().diag()
i, j = divmod(int(off.argmax()), K)
print(f"largest off the diagonal: {int(off[i, j])} x {LABELS[i]} -> {LABELS[j]}")

# %%
# A piece of the test side, read by the classifier. Where the answer is wrong, the right label stands behind it.


def read(text, most=40):
    ids, labels = example(text)
    ids, labels = ids[: most + 1], labels[: most + 1]
    with torch.no_grad():
        guess = classifier(torch.tensor([ids]))[0].argmax(-1).tolist()
    line = ""
    for piece, answer, label in zip(tokenizer.pieces(ids), guess, labels):
        if label == IGNORE:
            continue
        mark = "" if answer == label else f" (not {LABELS[label]})"
        line += f"{printable(piece.strip())}:{LABELS[answer]}{mark}  "
        if len(line) > 60:
            print(line)
            line = ""
    print(line)


read(program)

# %%
# What comes after is unknown
# ---------------------------
#
# Is a name called? The bracket that decides comes after the name. A causal model gives the name its logits before that,
# so they are the same with and without a bracket, while the labels differ.

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
# The best that such a model can do is to bet. A reader that waits for one more token does not have to. So train two
# probes on the frozen states: one reads the state of the token, the other reads the next state as well.
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
assert bet["token and next"] > bet["token"] + 0.08
assert bet["token and next"] > 0.9

# %%
# One token of patience is worth more than eight points, and leaves fewer than one mistake in ten. No training and no
# size buys this: the information is not in the text that the model has read so far. This is why taggers read a
# sentence from both sides.
#
# Other mistakes are of another kind. Inside a string the past is enough: the quote that opened it has been read. Here are
# the tokens of strings, by how many tokens of the string came before.

inside = torch.zeros(len(y_test), dtype=torch.long)
string = LABELS.index("string")
for place in range(1, len(y_test)):
    same = y_test[place] == string or y_test[place] == IGNORE
    if same and x_test[place] != END:
        inside[place] = inside[place - 1] + 1
for first, last in ((1, 8), (9, 32), (33, T)):
    here = (y_test == string) & (inside >= first) & (inside <= last)
    right = (answers["fine-tuned"] == y_test)[here]
    print(f"token {first:2} to {last:3}: {right.float().mean():.1%} of {len(right)}")
