"""A probe with its control: what it is fitted on, whose mean and scale, and which classes count."""

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal
from lm_from_scratch.inside.probe import Probe

V = 40_000


def reference(
    states: Tensor, labels: Tensor, words: Tensor, drawn: Tensor, held_out: Tensor, n_classes: int
) -> dict[str, float]:
    """The package's linear probe, with the matrix and bias of the nearest mean."""
    x = states[~held_out]
    mean, scale = x.mean(0), x.std(0, correction=0)

    def accuracy(y: Tensor) -> float:
        classes = torch.nn.functional.one_hot(y[~held_out], n_classes).to(x.dtype)
        centres = classes.T @ ((x - mean) / scale) / classes.sum(0)[:, None]
        probe = Probe(mean, scale, centres.T, -centres.square().sum(-1) / 2)
        return probe.accuracy(states[held_out], y[held_out])

    own, control = accuracy(labels), accuracy(drawn[words])
    return {"accuracy": own, "control": control, "selectivity": own - control}


# ------------------------------------------------------------------------------------- arguments


def given(
    g: Generator,
    N: int = 240,
    n_classes: int = 3,
    C: int = 8,
    n_words: int = 12,
    by_word: float = 0.0,
    signal: float = 1.0,
    rare: bool = False,
) -> Call:
    """States that are the sum of a word, of a class and of noise. The class depends on the word
    for a share ``by_word`` of them."""
    vocabulary = torch.randperm(V, generator=g)[:n_words]
    own = torch.arange(n_words) % n_classes
    drawn = torch.randint(n_classes, (V,), generator=g)
    drawn[vocabulary] = own[torch.randperm(n_words, generator=g)]
    kind = torch.randint(n_words, (N,), generator=g)
    kind[:n_words] = torch.arange(n_words)
    chance = torch.rand(N, generator=g, dtype=torch.float64)
    free = torch.randint(n_classes, (N,), generator=g)
    if rare:
        free = torch.where(torch.rand(N, generator=g) < 0.75, 0, free)
    labels = torch.where(chance < by_word, own[kind], free)
    labels[:n_words] = own
    held_out = torch.rand(N, generator=g) < 0.45
    held_out[:n_words] = False  # every word and every class is met
    held_out[-3:] = True
    known = normal(g, n_words, C, scale=1.5, dtype=torch.float64)[kind]
    found = signal * normal(g, n_classes, C, dtype=torch.float64)[labels]
    states = known + found + normal(g, N, C, dtype=torch.float64)
    order = torch.randperm(N, generator=g)
    states, labels, words = states[order], labels[order], vocabulary[kind][order]
    return call(states, labels, words, drawn, held_out[order], n_classes)


def sizes(g: Generator) -> Call:
    """The largest features say nothing."""
    made = given(g, C=10)
    scale = torch.tensor([1e-3, 0.03, 1.0, 30.0, 1e3], dtype=torch.float64).repeat(2)
    made.args[0].mul_(scale)
    made.args[0][:, 4::5] = 1e3 * normal(g, len(made.args[0]), 2, dtype=torch.float64)
    return made


def drifted(g: Generator) -> Call:
    """Held-out texts are of another kind: other means, other spreads."""
    made = given(g, N=400, signal=1.5)
    states, held_out = made.args[0], made.args[4]
    shift = 3 * normal(g, states.shape[1], dtype=torch.float64)
    spread = (1.2 * normal(g, states.shape[1], dtype=torch.float64)).exp()
    states[held_out] = states[held_out] * spread + shift
    return made


def far(g: Generator) -> Call:
    """Features far from 0, as a few are in every large model."""
    made = given(g)
    made.args[0][:, ::2] += 1e8
    return made


# ------------------------------------------------------------------------------- wrong answers

FREE, WORD, FEW, SIZES = "a class of its own", "a class that the word gives away", "few states", \
    "features of other sizes"  # fmt: skip
DRIFT, RARE, FAR = "held-out states of another kind", "a class that is frequent", "far from 0"
MANY = "many classes"

FITTED = "fitted = states[~held_out]"
STATISTICS = "mean, scale = fitted.mean(dim=0), fitted.std(dim=0)"
Z = "z = (states - mean) / scale"
PROBE = "probe = fit(z[~held_out], y[~held_out], n_classes)"
SAID, SHARE = "said = says(probe, z[held_out])", "(said == y[held_out]).double().mean().item()"
OWN, CONTROL = "own = accuracy(labels)", "control = accuracy(drawn[words])"
SELECTIVITY = '"selectivity": own - control}'
RETURN = "return {"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the probe is fitted on all states, the held-out ones too", {PROBE: "probe = fit(z, y, "
     "n_classes)"}, FEW),
    ("the accuracy is that on the states of the fit",
     {SAID: "said = says(probe, z[~held_out])", "said == y[held_out]": "said == y[~held_out]"},
     FEW),
    ("the accuracy is that on all states",
     {SAID: "said = says(probe, z)", "said == y[held_out]": "said == y"}, FEW),
    ("the two parts are exchanged: fitted on the held-out states",
     {FITTED: "held_out = ~held_out\n    fitted = states[~held_out]"}, DRIFT),
    ("mean and scale are those of all states", {FITTED: "fitted = states"}, DRIFT),
    ("held-out states are standardised by their own mean and scale",
     {Z: "held = states[held_out]\n    z = torch.where(held_out[:, None], (states - held.mean(0)) "
      "/ held.std(0), (states - mean) / scale)"}, DRIFT),
    ("held-out states have their own mean subtracted",
     {Z: "z = (states - torch.where(held_out[:, None], states[held_out].mean(0), mean)) / scale"},
     DRIFT),
    ("held-out states are not standardised",
     {Z: "z = torch.where(held_out[:, None], states, (states - mean) / scale)"}, DRIFT),
    ("features keep their own sizes, or have one scale in common", {Z: "z = states"}, SIZES),
    ("features are multiplied by their scale", {Z: "z = (states - mean) * scale"}, SIZES),
    ("each state is standardised by itself, over its features",
     {Z: "z = (states - states.mean(dim=1, keepdim=True)) / states.std(dim=1, keepdim=True)"},
     SIZES),
    ("divided by the variance", {"fitted.std(dim=0)": "fitted.var(dim=0)"}, SIZES),
    ("the control is fitted on its classes and measured on the real ones",
     {CONTROL: 'probe = fit(z[~held_out], drawn[words][~held_out], n_classes)\n    control = '
      '(says(probe, z[held_out]) == labels[held_out]).double().mean().item()'}, FREE),
    ("the control is measured on its classes and fitted on the real ones",
     {CONTROL: 'probe = fit(z[~held_out], labels[~held_out], n_classes)\n    control = '
      '(says(probe, z[held_out]) == drawn[words][held_out]).double().mean().item()'}, FREE),
    ("the classes of the held-out states are shuffled as well, state by state",
     {CONTROL: "task = drawn[words]\n    held = task[held_out]\n    "
      "task[held_out] = held[torch.randperm(len(held))]\n    control = accuracy(task)"}, FREE),
    ("the control shuffles the labels: a word has another class each time",
     {CONTROL: "control = accuracy(labels[torch.randperm(len(labels))])"}, FREE),
    ("a class is drawn for each state, not for each word",
     {CONTROL: "control = accuracy(torch.randint(n_classes, labels.shape))"}, FREE),
    ("the first classes that were drawn are taken, whatever the words are",
     {CONTROL: "control = accuracy(drawn[: len(words)])"}, FREE),
    ("the class of each class, not of each word", {CONTROL: "control = accuracy(drawn[labels])"},
     MANY),
    ("the states of the control are random as well",
     {CONTROL: "z = torch.randn(z.shape, dtype=z.dtype)\n    control = accuracy(drawn[words])"},
     FREE),
    ("chance is the control: 1 of the number of classes", {CONTROL: "control = 1 / n_classes"},
     FREE),
    ("the most frequent class is the control",
     {CONTROL: "control = labels[held_out].bincount().max().item() / held_out.sum().item()"}, FREE),
    ("the quotient of both accuracies", {SELECTIVITY: '"selectivity": own / control}'}, FREE),
    ("the control minus the accuracy", {SELECTIVITY: '"selectivity": control - own}'}, FREE),
    ("the share of what the control left to be found",
     {SELECTIVITY: '"selectivity": (own - control) / (1 - control)}'}, FREE),
    ("the size of the difference, even where the control is better",
     {SELECTIVITY: '"selectivity": abs(own - control)}'}, MANY),
    ("the accuracy minus 1 of the number of classes",
     {SELECTIVITY: '"selectivity": own - 1 / n_classes}'}, FREE),
    ("errors, not what is right", {SHARE: "1 - " + SHARE}, FREE),
    ("per cent", {SHARE: "100 * " + SHARE}, FREE),
    ("numbers of states, not shares", {SHARE: "float((said == y[held_out]).sum())"}, FREE),
    ("the mean of the accuracies of the classes",
     {SHARE: "sum((said == y[held_out])[y[held_out] == c].double().mean().nan_to_num().item() "
      "for c in range(n_classes)) / n_classes"}, RARE),
    ("all is computed in float32", {FITTED: "states = states.float()\n    fitted = "
     "states[~held_out]"}, FAR),
    ("the states of the caller are standardised", {Z: "z = states.sub_(mean).div_(scale)"}, FREE),
]  # fmt: skip

CASES = (
    Case(FREE, lambda g: given(g, signal=1.6),
         "fit on one part and measure on the other, for the labels and for drawn[words]", points=3,
         teaching="both probes, before anything is strange"),
    Case(WORD, lambda g: given(g, by_word=0.95, signal=0.4),
         "the probe is good, and so is its control: little is left", points=2,
         teaching="the reason for a control"),
    Case(FEW, lambda g: given(g, N=100, C=40, n_words=8, signal=0.3),
         "what it was fitted on, a probe always knows: measure on the held-out states", points=2,
         teaching="what is known by heart"),
    Case(SIZES, sizes, "every feature is divided by its own standard deviation, over the states",
         points=2, teaching="one reason to standardise"),
    Case(DRIFT, drifted,
         "mean and scale are part of the probe: take those of the states that it was fitted on",
         points=2, teaching="where a leak of mean and scale shows"),
    Case(RARE, lambda g: given(g, rare=True), "each state counts once, whatever its class is",
         teaching="a class that is easy to guess"),
    Case(MANY, lambda g: given(g, N=300, n_classes=6, n_words=24, C=30, signal=0.1),
         "selectivity may be negative, and says so", points=2,
         teaching="a control that is better than the probe"),
    Case(FAR, far, "float64 stays float64"),
)  # fmt: skip

EXERCISE = Exercise(
    name="control_probe", function="control_probe", page="11_look_inside/1_probes",
    minutes=20, difficulty=2,
    outcome="Measure what a probe finds in a model, and what it would find where nothing is.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Which numbers may depend on the held-out states? Only two: both are accuracies.",
        "Write a function from classes `(N,)` to an accuracy, and call it twice. The classes of "
        "the control are one indexing away: a class for each word, and a word for each state.",
        "`states[~held_out]` gives mean and standard deviation over dim=0, and all states are "
        "standardised by these. `fit` gets one part of them, `says` the other.",
    ),
)  # fmt: skip
