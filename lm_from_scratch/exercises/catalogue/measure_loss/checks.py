"""Bits per byte: models that cut a text into different tokens, compared by the text itself."""

import math
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers

PLAIN = "the cat sat on a mat and saw rain fall in spring while we ate bread near old towns"
WIDE = "naïve façade 你好世界 Übermut ёлка smörgås 東京の夜 überall café 数学"
RARE = " 🎉 e\u0301cole"  # four bytes for a character, and two characters that look like one


def best_model(losses: dict[str, list[Tensor]], texts: list[str]) -> tuple[str, float]:
    """All losses of a model in one tensor, all texts in one."""
    size = len("".join(texts).encode("utf-8"))
    rates = {
        name: torch.cat(t).double().sum().item() / math.log(2) / size for name, t in losses.items()
    }
    name = min((n for n in rates if rates[n] == rates[n]), key=lambda n: rates[n])
    return name, rates[name]


def text(g: Generator, count: int, words: str = PLAIN) -> str:
    choice = words.split()
    return " ".join(choice[int(i)] for i in integers(g, 0, len(choice), count))


def cut(g: Generator, of: str, length: int, bits: float) -> Tensor:
    """Losses of tokens of so many bytes each, about so many bits per byte."""
    count = -(-len(of.encode()) // length)
    return torch.rand(count, generator=g).add(0.5) * bits * length * math.log(2)


def models(
    g: Generator, texts: list[str], *kinds: tuple[str, int, float], dtype: Any = None
) -> Call:
    """Each kind is a name, the bytes of a token, and bits per byte."""
    losses = {n: [cut(g, t, length, bits).to(dtype) for t in texts] for n, length, bits in kinds}
    return call(losses, texts)


def one(g: Generator) -> Call:
    """The longer tokens have the higher loss, and the better model."""
    return models(g, [text(g, 60)], ("short", 2, 2.6), ("long", 5, 1.7))


def shorter(g: Generator) -> Call:
    """Here the shorter tokens are better. A text is there twice."""
    return models(g, [text(g, 60)] * 2, ("long", 6, 2.4), ("short", 1, 1.6), ("middle", 3, 3.5))


def unequal(g: Generator) -> Call:
    """A short text on which the worse model is far better: a mean of means is taken in."""
    texts = [text(g, 2), text(g, 90)]
    losses = {
        "good at short ones": [cut(g, texts[0], 3, 0.2), cut(g, texts[1], 3, 2.0)],
        "good at long ones": [cut(g, texts[0], 3, 4.0), cut(g, texts[1], 3, 1.2)],
    }
    return call(losses, texts)


def empty(g: Generator) -> Call:
    """A text without losses has its bytes, and losses without a text count."""
    made = models(g, ["", text(g, 20), "", text(g, 3)], ("a", 3, 2.9), ("b", 4, 1.8))
    none, end = torch.tensor([]), torch.tensor([3.0])
    losses = {name: [none, x[1], end, none] for name, x in made.args[0].items()}
    return call(losses, *made.args[1:])


def half(g: Generator) -> Call:
    """Thousands of losses: a sum in bfloat16 stops growing, one in float16 is infinite."""
    texts = [text(g, 3000)]
    made = models(g, texts, ("bf16", 2, 2.9), ("fp16", 1, 2.2))
    rounded = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return call({n: [x.to(rounded[n]) for x in t] for n, t in made.args[0].items()}, texts)


def broken(g: Generator) -> Call:
    made = models(
        g, [text(g, 9), text(g, 9)], ("first", 3, 0.4), ("second", 3, 1.9), ("third", 2, 2.9)
    )
    made.args[0]["first"][1][3] = math.nan
    return made


def equal(g: Generator) -> Call:
    made = models(g, [text(g, 9)], ("a", 3, 2.9), ("m", 3, 1.5))
    losses = made.args[0]
    return call(losses | {name: [x.clone() for x in losses["m"]] for name in "bz"}, *made.args[1:])


def certain(g: Generator) -> Call:
    """A model that knows the text by heart."""
    made = models(g, [text(g, 9)], ("a", 3, 1.5), ("b", 3, 2.0))
    return call(made.args[0] | {"c": [torch.zeros(9)]}, *made.args[1:])


def poor(g: Generator) -> Call:
    """All are bad, and nearly equally."""
    made = models(g, [f"{text(g, 9)} \n\t"], ("a", 3, 150.0))
    losses = made.args[0]["a"][0]
    near = [losses * (1 + step) for step in (0, -1e-6, 1e-6)]
    return call({name: [x] for name, x in zip("abc", near, strict=True)}, *made.args[1:])


# ------------------------------------------------------------------------------- wrong answers

SIZE = "sum(len(text.encode()) for text in texts)"
NATS = "sum(float(tensor.double().sum()) for tensor in tensors)"
RATE = "nats / math.log(2) / size"
ONE, SHORT = "the higher loss, the better model", "three models, the shortest tokens are best"
UNEQUAL, WIDER, EMPTY = "a short text and a long one", "more bytes than characters", "empty texts"
HALF, BROKEN = "thousands of losses in half precision", "a NaN among the losses"
EQUAL, CERTAIN = "models alike", "a model that knows the text"
POOR = "three bad models, nearly alike"


#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the loss of a token, not of a byte: models with other tokens cannot be compared by it",
     {RATE: "nats / math.log(2) / sum(len(tensor) for tensor in tensors)"}, ONE),
    ("characters instead of bytes", {SIZE: "sum(len(text) for text in texts)"}, WIDER),
    ("words instead of bytes", {SIZE: "sum(len(text.split()) for text in texts)"}, ONE),
    ("two bytes for every character", {SIZE: "sum(2 * len(text) for text in texts)"}, ONE),
    ("UTF-16, with its mark at the start", {"text.encode()": 'text.encode("utf-16")'}, ONE),
    ("nats, not bits", {RATE: "nats / size"}, ONE),
    ("nats are multiplied by ln 2, not divided", {RATE: "nats * math.log(2) / size"}, ONE),
    ("the perplexity of a byte", {RATE: "math.exp(nats / size)"}, ONE),
    ("bits in all, not for each byte", {RATE: "nats / math.log(2)"}, ONE),
    ("the worst model", {"min(bits,": "max(bits,"}, ONE),
    ("the model with the lowest loss of a token, and the bits per byte of that one",
     {"key=bits.__getitem__":
      "key=lambda n: sum(x.double().sum() for x in losses[n]) / sum(map(len, losses[n]))"}, ONE),
    ("bytes per bit", {RATE: "size * math.log(2) / nats"}, ONE),
    ("the mean of the texts, where a short one weighs as much as a long one",
     {NATS: "sum(float(x.double().sum()) / len(t.encode()) for x, t in zip(tensors, texts) if t)",
      RATE: "nats / len([t for t in texts if t]) / math.log(2)"}, UNEQUAL),
    ("the mean loss of each text is added up",
     {NATS: "sum(float(x.double().mean()) for x in tensors if len(x))"}, ONE),
    ("the last text is left out", {"in texts)": "in texts[:-1] or texts)"}, UNEQUAL),
    ("the first text stands for all",
     {SIZE: "len(texts[0].encode())", NATS: "float(tensors[0].double().sum())"}, UNEQUAL),
    ("each text is divided by on its own, and one is empty",
     {f"nats = {NATS}": f"[1.0 / len(text.encode()) for text in texts]\n        nats = {NATS}"},
     EMPTY),
    ("texts that are equal count once", {"for text in texts)": "for text in set(texts))"}, SHORT),
    ("a text whose losses are empty is left out",
     {SIZE: "sum(len(text.encode()) for i, text in enumerate(texts) "
            "if any(len(held[i]) for held in losses.values()))"}, EMPTY),
    ("losses at an empty text are left out",
     {NATS: "sum(float(x.double().sum()) for x, text in zip(tensors, texts) if text)"}, EMPTY),
    ("three bytes at most for a character",
     {SIZE: "sum(1 if ord(c) < 128 else 2 if ord(c) < 2048 else 3 for t in texts for c in t)"},
     WIDER),
    ("a loss of 0 is taken for none", {"if not math.isnan(nats):": "if nats > 0:"}, CERTAIN),
    ("spaces and line ends around a text are not counted",
     {"text.encode()": "text.strip().encode()"}, POOR),
    ("rounded before they are compared",
     {"key=bits.__getitem__": "key=lambda n: round(bits[n], 1)"}, POOR),
    ("the sum is computed in half precision", {"tensor.double().sum()": "tensor.sum()"}, HALF),
    ("a NaN is taken for the least", {"if not math.isnan(nats):": "if True:"}, BROKEN,
     "its result is NaN, which the report says in words"),
    ("a NaN is counted as no loss",
     {"tensor.double().sum()": "tensor.double().nan_to_num().sum()"}, BROKEN),
    ("the last of equal models", {"min(bits,": "min(reversed(bits),"}, EQUAL),
    ("the first name in the alphabet of equal models", {"min(bits,": "min(sorted(bits),"}, EQUAL),
    ("the number alone", {"return best, bits[best]": "return bits[best]"}, ONE),
]  # fmt: skip

CASES = (
    Case(ONE, one,
         "longer tokens lose more at each of them; what counts is the loss of the whole text",
         points=2, teaching="the decision that a loss of tokens gets wrong"),
    Case(SHORT, shorter, "now the other way round, and a text is there twice"),
    Case(UNEQUAL, unequal, "add up all losses and all bytes, and divide once", points=2,
         teaching="a mean of means turns the decision round here"),
    Case(WIDER,
         lambda g: models(g, [text(g, 12, WIDE) + RARE, text(g, 9)], ("a", 4, 1.9), ("b", 2, 2.9)),
         "len(text) counts characters; text.encode() has the bytes"),
    Case(EMPTY, empty, "an empty text has no tokens and no bytes, and changes nothing"),
    Case(HALF, half, "a sum in bfloat16 stops growing, one in float16 overflows",
         teaching="losses as a run in bfloat16 stores them"),
    Case(BROKEN, broken, "no comparison with NaN is true: take such a model out before"),
    Case(EQUAL, equal, "m, b and z are equal, and m was named first"),
    Case(CERTAIN, certain, "0 is a number of bits like others"),
    Case(POOR, poor, "compare the numbers as they are; the best may be bad"),
)  # fmt: skip

EXERCISE = Exercise(
    name="measure_loss", function="best_model", page="1_gpt2/4_training", minutes=15, difficulty=2,
    outcome="Decide which of several models predicts a text best, whatever their tokens are.",
    after=("cross_entropy",), reference=best_model, cases=CASES, wrong=planted(WRONG),
    hints=(
        "The loss of a text is a sum over its tokens. Does it matter how many there are?",
        "One number for each model: nats of all texts, over bytes of all texts. From nats to bits "
        "is a division by a constant; does it change the decision, or only the number?",
        "Three things can spoil the sum before the comparison: the dtype in which it is made, a "
        "NaN in it, and the unit by which it is divided. Look at each on its own.",
    ),
)  # fmt: skip
