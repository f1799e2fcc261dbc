"""No key of a config is ignored: every key that transformers reads is turned to other values, one
at a time, and ours either computes what transformers then computes or refuses the key by name.

Nothing is listed by hand. The keys are those of the class and of its aliases, those that its source
takes out of what is left over, and those that are asked for while a model is built and called. A
key without effect is one after which the logits of both are what they were.
"""

import dataclasses
import inspect
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import CLASSIFIERS, PUBLISHED, drawn, enlarge_biases_
from safetensors.torch import save_file
from tiny_models import enlarge_, token_ids

from lm_from_scratch.checkpoint.weights import load_checkpoint

HEADS = {"": "CausalLM", "Sequence": "SequenceClassification", "Token": "TokenClassification"}
#: Of drawn configs some that have windows, experts, dense layers, no bias, untied heads.
SEEDS = (4, 1, 2)
#: What only configs of several layers have, in the words of transformers.
ROTATIONS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
]  # fmt: skip
NULL = [None]
#: Values of every kind, for a key whose default says nothing of its kind.
ANY = [True, False, 2, 0.5, "x", [0], {"0": {"intermediate_size": 8}}]


def others(value: Any, key: str) -> list[Any]:
    """Other values that a key may plausibly have."""
    if key.endswith("rope_parameters") or key == "rope_scaling":
        return [{**rope, "rope_theta": 500.0} for rope in ROTATIONS] + ROTATIONS + NULL
    if value is None:
        return ANY
    if isinstance(value, bool):
        return [not value, *NULL]
    if isinstance(value, int):
        return [value + 1, 2 * value, value // 2, 0, -1, *NULL]
    if isinstance(value, float):
        return [value + 0.3, 2.0, 0.0, *NULL]
    if isinstance(value, str):
        words = ["gelu", "tanh"] if key.startswith("hidden_act") or "activ" in key else []
        return [*words, "x", *NULL]
    if isinstance(value, list) and value and isinstance(value[0], str):
        words = ["full_attention", "sliding_attention", "linear_attention", "chunked_attention"]
        return [[word, *value[1:]] for word in words] + [value[:-1], [], *NULL]
    if isinstance(value, list):
        return [[0], [1] * len(value), value[::-1], [], *NULL]
    return ANY


def tiny(family: str, seed: int, head: str) -> dict[str, Any]:
    """A config of that family as a file has it."""
    config = drawn(family, seed)
    if head:
        config |= {"pad_token_id": 5, "classifier_dropout": 0.3, "num_labels": 3}
    return config


def built(config: dict[str, Any], head: str) -> Any:
    """The model of transformers, in float32, with large weights."""
    import transformers

    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    theirs._experts_implementation = "eager"
    model = getattr(transformers, f"AutoModelFor{HEADS[head]}").from_config(theirs).eval()
    enlarge_(model.float())
    enlarge_biases_(model)
    return model


IDX = token_ids(2, 16)
IDX[0, 13:] = 5  # a text that ends with what pads
IDX[1, 6] = 5


def rows_for(model: Any, head: str) -> list[torch.Tensor]:
    """Texts in one batch; one by one, where transformers cannot tell what pads."""
    alone = head == "Sequence" and model.config.pad_token_id is None
    return [*IDX[:, None]] if alone else [IDX]


@torch.no_grad()
def logits_of(model: Any, head: str) -> torch.Tensor:
    results = [
        model(rows, attention_mask=torch.ones_like(rows), use_cache=False, return_dict=True)
        for rows in rows_for(model, head)
    ]
    return torch.cat([result.logits for result in results])


@cache
def keys(family: str, head: str) -> dict[str, Any]:
    """What transformers reads, with the value that it has by default."""
    import transformers

    base = transformers.PreTrainedConfig
    kind = transformers.CONFIG_MAPPING[family]
    asked: set[str] = set()

    def watched(self: Any, key: str, get: Any = base.__getattribute__) -> Any:
        asked.add(key)
        return get(self, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "__getattribute__", watched)
        logits_of(built(tiny(family, SEEDS[0], head), head), head)
    source = "".join(inspect.getsource(c.__post_init__) for c in (kind, base))
    source += inspect.getsource(base.convert_rope_params_to_dict)
    asked |= {*re.findall(r'kwargs(?:\.\w+\(|\[)"(\w+)"', source)}
    asked |= {*kind.attribute_map} | {*kind().to_dict()}
    default, own = kind(), {**vars(kind())}
    default.allow_global_per_layer_attribute_access = True  # of layers that differ
    properties = {name for name, value in inspect.getmembers(base) if isinstance(value, property)}
    settable = {name for name in properties if getattr(base, name).fset}
    fields = {field.name for field in dataclasses.fields(kind)} | {*kind.attribute_map}
    constant = {name for name in dir(kind) if name not in own} - settable - fields
    chosen = {key for key in asked - constant if not key.startswith("_")}
    values = drawn(family, SEEDS[0])
    return {
        key: values.get(key, getattr(default, key, None) if key != "per_layer_config" else None)
        for key in sorted(chosen)
    }


@cache
def before(family: str, seed: int, head: str) -> torch.Tensor:
    return logits_of(built(tiny(family, seed, head), head), head)


def verdict(family: str, seed: int, head: str, key: str, value: Any, folder: Path) -> str:
    """What becomes of a file in which that key has that value."""
    config = tiny(family, seed, head) | {key: value}
    try:
        twin = built(config, head)
        want = logits_of(twin, head)
    except Exception:
        return "no model of transformers"
    tensors = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    if twin.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    architecture = {"architectures": [type(twin).__name__]}
    (folder / "config.json").write_text(json.dumps(architecture | config))
    try:
        ours = load_checkpoint(folder).model
    except ValueError as error:
        names = [key, "partial_rotary_factor"] if key.startswith("rope") else [key]  # it went along
        named = any(name in str(error) for name in names)
        return "refused" if named else f"refused, and not by its name: {error}"
    with torch.no_grad():
        logits = torch.cat([ours(row) for row in rows_for(twin, head)])
    if logits.shape != want.shape:
        return f"another shape: {tuple(logits.shape)}"
    if not (error := (logits - want).abs().max() / want.abs().max().clamp(min=1.0)) < 1e-4:
        return f"another model, without a word: off by {error:.2g}"
    was = before(family, seed, head)
    return "without effect" if want.shape == was.shape and torch.equal(want, was) else "equal"


def turned(family: str, head: str, seed: int, folder: Path, every: bool = True) -> Counter[str]:
    """How many values of how many keys have which outcome; each must be one of the good ones."""
    outcomes: Counter[str] = Counter()
    for key, value in keys(family, head).items():
        for other in others(value, key):
            outcome = verdict(family, seed, head, key, other, folder)
            assert outcome in GOOD, f"{family}: {key}={other!r}: {outcome}"
            outcomes[outcome] += 1
            if not every and outcome != "no model of transformers":
                break
    return outcomes


GOOD = ("equal", "refused", "without effect", "no model of transformers")


@pytest.mark.filterwarnings("ignore")  # of transformers, about odd configs
@pytest.mark.parametrize(
    ("family", "head", "seed", "every"),
    [
        ("llama", "", SEEDS[0], False),
        pytest.param("qwen2", "Sequence", SEEDS[0], False, marks=pytest.mark.slow),
        *(
            pytest.param(family, head, seed, True, marks=pytest.mark.slow)
            for family, head in [*((family, "") for family in PUBLISHED), *CLASSIFIERS]
            for seed in (SEEDS[:1] if head else SEEDS)
        ),
    ],
)
def test_no_key_of_a_config_is_ignored(
    family: str, head: str, seed: int, every: bool, tmp_path: Path
) -> None:
    assert {"is_causal", "per_layer_config", "vocab_size"} <= {*keys(family, head)}
    outcomes = turned(family, head, seed, tmp_path, every)
    assert {"equal", "refused", "without effect"} <= {*outcomes}
