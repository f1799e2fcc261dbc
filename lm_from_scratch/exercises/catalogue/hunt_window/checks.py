"""Bug hunt: a window of one key too many, in the wrong layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer
from lm_from_scratch.models.qwen2 import Qwen2Config


def reference(
    n_layers: int,
    sliding_window: int | None,
    max_window_layers: int,
    use_sliding_window: bool,
    T: int,
    S: int,
) -> Tensor:
    """The windows of the package's config, and its rule of visibility."""
    windows: list[int | None] = [None] * n_layers
    if use_sliding_window:
        windows = Qwen2Config(
            n_layer=n_layers, sliding_window=sliding_window, max_window_layers=max_window_layers
        ).windows
    places = torch.arange(S)[None]
    seen = Visibility(places[:, S - T :], places, dense=True)
    return torch.stack([seen.within(window).rule()[0, 0] for window in windows])


def story(g: Generator) -> Call:
    S = integer(g, 9, 13)
    return call(4, 4, 2, True, S, S)


def full_pass(g: Generator) -> Call:
    S = integer(g, 8, 11)
    return call(5, integer(g, 3, 6), 3, True, S, S)


def after_a_cache(g: Generator) -> Call:
    S = integer(g, 9, 12)
    return call(3, 4, 1, True, 3, S)


def every_layer(g: Generator) -> Call:
    S = integer(g, 7, 10)
    return call(3, 3, 0, True, S, S)


def no_layer(g: Generator) -> Call:
    S = integer(g, 7, 10)
    return call(3, 3, 3, True, S, S)


def smallest(g: Generator) -> Call:
    S = integer(g, 4, 7)
    return call(3, 1, 2, True, S, S)


def just_longer(g: Generator) -> Call:
    S = integer(g, 4, 7)
    return call(3, S - 1, 1, True, S, S)


def switched_off(g: Generator) -> Call:
    S = integer(g, 7, 10)
    return call(3, integer(g, 2, 4), 1, False, 4, S)


def short(g: Generator) -> Call:
    W = integer(g, 3, 7)
    return call(4, W, 2, True, W, W)


def keys_of_the_last_query(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """How many keys the last query sees, for each layer."""
    counts = function(*args)[:, -1].sum(-1).tolist()
    return {f"the number of keys in layer {i}": count for i, count in enumerate(counts)}


# ------------------------------------------------------------------------------- wrong answers

ARGUMENTS = "n_layers, sliding_window, max_window_layers, use_sliding_window, T, S"
SLIDES = "layer >= max_window_layers"
SWITCH = "use_sliding_window and layer >= max_window_layers"
LEFT = "sliding_window - 1"

KEYS, ALL_SLIDE = "keys that the last query of each layer sees", "every layer slides"
NONE_SLIDES, CACHE = "no layer slides", "three queries after a cache"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the code as found",
     {"    masks = []": f"    return layer_masks_as_found({ARGUMENTS})\n    masks = []"}, KEYS),
    ("the window is repaired, but the lower layers slide",
     {SLIDES: "layer < max_window_layers"}, KEYS),
    ("the layers are repaired, but the window has a key too many", {LEFT: "sliding_window"}, KEYS),
    ("the window has a key too few", {LEFT: "sliding_window - 2"}, KEYS),
    ("one key more is added, where one must be taken away", {LEFT: "sliding_window + 1"}, KEYS),
    ("the layer max_window_layers itself does not slide",
     {SLIDES: "layer > max_window_layers"}, KEYS),
    ("the layer before max_window_layers slides too",
     {SLIDES: "layer >= max_window_layers - 1"}, KEYS),
    ("the last max_window_layers layers slide, not those from there on",
     {SLIDES: "layer >= n_layers - max_window_layers"}, "five layers, the last two slide"),
    (ALL_SLIDE, {SWITCH: "use_sliding_window"}, KEYS),
    (NONE_SLIDES, {SWITCH: "False"}, KEYS),
    ("every second layer slides", {SLIDES: "layer % 2 == 1"}, KEYS),
    ("max_window_layers = 0 is taken for none",
     {SLIDES: "0 < max_window_layers <= layer"}, ALL_SLIDE),
    ("the last layer slides in any case",
     {SLIDES: "layer >= min(max_window_layers, n_layers - 1)"}, NONE_SLIDES),
    ("the window is left out when there are few queries",
     {SWITCH: f"{SWITCH} and sliding_window < T"}, CACHE),
    ("a single query sees everything",
     {SWITCH: f"{SWITCH} and T > 1"}, "one query after 299 tokens"),
    ("max_window_layers = n_layers is taken for 0",
     {SLIDES: "layer >= max_window_layers % n_layers"}, NONE_SLIDES),
    ("the window is left out one token too long",
     {SWITCH: f"{SWITCH} and S > sliding_window + 1"}, "a text one token longer than the window"),
    ("a window of one key is taken for none",
     {"left = sliding_window - 1 if slides else None": "left = None\n"
      "        if slides and sliding_window > 1:\n"
      "            left = sliding_window - 1"}, "a window of one key"),
    ("the switch is forgotten",
     {SWITCH: f"sliding_window is not None and {SLIDES}"}, "the switch is off"),
    ("the window is compared with the length before the switch is asked",
     {SWITCH: f"S > sliding_window and {SWITCH}"}, "no window at all"),
    ("the queries are the first tokens, not the last",
     {"masks.append(flash_rule(T, S, left))": "masks.append(flash_rule(S, S, left)[:T])"}, CACHE),
    ("True where the key is hidden", {"torch.stack(masks)": "~torch.stack(masks)"}, KEYS),
    ("every layer gets the mask of the first",
     {"torch.stack(masks)": "masks[0].expand(n_layers, T, S)"}, KEYS),
]  # fmt: skip

CASES = (
    Case(KEYS, story, "the first two layers see everything, and the last two see four keys",
         points=2, use=keys_of_the_last_query, teaching="the numbers of the story"),
    Case("five layers, the last two slide", full_pass,
         "max_window_layers is the index of the first layer that slides", points=2,
         teaching="every mask, where the layers that slide are not half of all"),
    Case(CACHE, after_a_cache, "the window counts keys, and the queries are the last of them",
         teaching="fewer queries than keys, in a text that can be drawn"),
    Case("one query after 299 tokens", lambda g: call(2, integer(g, 3, 7), 1, True, 1, 300),
         "a single query has the same window as many, however long the text is"),
    Case(ALL_SLIDE, every_layer, "with max_window_layers = 0, layer 0 slides too"),
    Case(NONE_SLIDES, no_layer, "with max_window_layers = n_layers all see everything"),
    Case("a window of one key", smallest, "each token sees itself, and nothing before it"),
    Case("a text one token longer than the window", just_longer,
         "the last query does not see the first key, in layers that slide"),
    Case("the switch is off", switched_off,
         "use_sliding_window is False: no layer slides, whatever the window is", guard=True),
    Case("no window at all", lambda g: call(3, None, 1, False, 4, integer(g, 7, 10)),
         "the switch is off, and sliding_window is None: it cannot be compared with a number",
         guard=True),
    Case("a text as long as the window", short,
         "nothing is too old in it, so every layer sees everything before it", guard=True,
         teaching="the code as found passes it: this is why a short test saw nothing"),
)  # fmt: skip

EXERCISE = Exercise(
    name="hunt_window", function="layer_masks", page="3_attention/2_masks", minutes=15,
    difficulty=1,
    outcome="Find two mistakes that hide each other, by counting what each layer sees.",
    reference=reference, hunt="Q2, Q3", after=("visibility",), cases=CASES, wrong=planted(WRONG),
    hints=(
        "Count by hand: how many keys are between `query - left` and `query`, both included?",
        "There are two mistakes, and each alone leaves the logits wrong. So do not compare logits: "
        "compare 5, 5, 12, 12 with 12, 12, 4, 4. The numbers are wrong, and so is their order.",
        "`left` counts the keys beside the query's own, which is one of the window. And "
        "`max_window_layers` is the first layer of one kind: the text says of which. This was the "
        "FlashAttention path of the first Qwen2 in transformers; its documentation and code "
        "disagreed for months: "
        "https://github.com/huggingface/transformers/issues/35896 and "
        "https://github.com/huggingface/transformers/issues/38787. The page on conventions has "
        "the whole story.",
    ),
)  # fmt: skip
