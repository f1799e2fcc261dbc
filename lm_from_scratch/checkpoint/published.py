"""What a published folder says besides its weights, kept whole.

A ``config.json`` holds more than a model computes with: the names of labels, the padding token of a
classifier, the dropout of a head that is not there, the version of the program that wrote it. It is
handed on beside the model, and written back as it was; only what has changed since is ours.
So is ``generation_config.json``, which says how a text should be continued and where it ends.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_from_scratch.checkpoint.architectures import Config
from lm_from_scratch.checkpoint.configs import config_from_dict, config_to_dict
from lm_from_scratch.checkpoint.families import of_text
from lm_from_scratch.checkpoint.folders import read_json
from lm_from_scratch.checkpoint.ideas import NEXT
from lm_from_scratch.limits import Count, Share, require, shown
from lm_from_scratch.models.heads import Classifier, SequenceClassifier, TokenClassifier
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.text.tokenizer import Tokenizer

#: The file that says how a text is continued, and where it ends.
GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Published:
    """The contents of the files beside the weights; empty for a model that was made here."""

    config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The class that the ``config.json`` names, or an empty string."""
        return (self.config.get("architectures") or [""])[0]

    @property
    def n_labels(self) -> int:
        """How many labels a classifier has: two, where nothing is said. A number goes before
        names, as in ``transformers``."""
        return self.config.get("num_labels") or len(self.config.get("id2label") or {}) or 2

    @property
    def labels(self) -> list[str]:
        """The names of a classifier's labels; ``LABEL_i`` for those without one, and for all if
        there is another number of them."""
        names = {int(key): str(name) for key, name in (self.config.get("id2label") or {}).items()}
        names = names if len(names) == self.n_labels else {}
        return [names.get(i, f"LABEL_{i}") for i in range(self.n_labels)]

    @property
    def dropout(self) -> float:
        """The dropout in front of the head that labels tokens, as ``transformers`` finds it."""
        named = (self.config.get(key) for key in ("classifier_dropout", "hidden_dropout"))
        return next((value for value in named if value is not None), 0.1)


def read_published(folder: Path) -> tuple[Published, Config]:
    """What the folder of a model says, and the config of the model. Of a model for pictures too
    that is its part for text alone, as which it is written again.

    Raises ``ValueError`` for what cannot be read or built, with the file.
    """
    path = folder / "config.json"
    published = Published({**of_text(read_json(path))}, read_generation(folder))
    try:
        _check(published.config)
        config = config_from_dict(published.config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return published, config


def read_generation(folder: Path) -> dict[str, Any]:
    """What a folder says of how a text is continued; nothing, where it does not say it. Raises
    ``ValueError`` for ends that are no tokens."""
    path = folder / GENERATION
    contents = read_json(path) if path.exists() else {}
    ids = contents.get("eos_token_id")
    if ids is not None and (not _ids(ids) or any(type(n) is not int for n in _ids(ids))):
        raise ValueError(f"{path}: eos_token_id={shown(ids)} must be one token id or several")
    return contents


def _check(config: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` for what no model of ours has a field for, and is read all the same."""
    names = config.get("architectures")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(n, str) for n in names)
    ):
        raise ValueError(f"architectures={shown(names)} must be a list of names")
    labels = config.get("id2label") or {}
    if not isinstance(labels, Mapping) or not all(re.fullmatch(r"\d{1,9}", key) for key in labels):
        raise ValueError(f"id2label={shown(labels)} must be an object with numbers for keys")
    if config.get("token_classification_bias", True) is not True:
        bias = shown(config["token_classification_bias"])
        raise ValueError(f"token_classification_bias={bias} is not supported, only True")
    if config.get("num_labels") is not None:
        require(Count, num_labels=config["num_labels"])
    for key in ("classifier_dropout", "hidden_dropout"):
        if config.get(key) is not None:
            require(Share, **{key: config[key]})


#: Of a model that was made here.
NOTHING = Published()


def model_to_dict(model: CausalLM | Classifier, published: Published = NOTHING) -> dict[str, Any]:
    """The contents of the model's ``config.json``: those it came with, and what has changed since.

    Its dtype and its quantised weights are not among them.
    """
    model_type = published.config.get("model_type")
    config = config_to_dict(model.backbone.config, model_type)
    family = config["architectures"][0].removesuffix("LMHeadModel").removesuffix("ForCausalLM")
    was: dict[str, Any] = {}
    if published.config:
        size = config_from_dict(published.config).vocab_size
        # read with today's vocabulary, in which a token id that meant none may be a token
        resized = published.config | {"vocab_size": config["vocab_size"]}
        was = config_to_dict(config_from_dict(resized), model_type) | {"vocab_size": size}
        config = {key: value for key, value in config.items() if value != was.get(key)}
    config = {**published.config, **config}
    config |= dict.fromkeys(config.keys() & set(NEXT), 0)  # whose layers are not read
    if not isinstance(model, Classifier):
        config["architectures"] = was.get("architectures") or config["architectures"]
        return config
    kind = "Sequence" if isinstance(model, SequenceClassifier) else "Token"
    config["architectures"] = [f"{family}For{kind}Classification"]
    if not was or published.n_labels != model.score.out_features:
        config["id2label"] = {str(i): label for i, label in enumerate(labels(model, published))}
        config["label2id"] = {label: int(i) for i, label in config["id2label"].items()}
        config.pop("num_labels", None)
    if isinstance(model, TokenClassifier) and (not was or published.dropout != model.dropout.p):
        config["classifier_dropout"] = model.dropout.p
    return config


def labels(model: Classifier, published: Published = NOTHING) -> list[str]:
    """What the logits of a classifier stand for: the labels of its ``config.json``, or ``LABEL_0``
    and so on."""
    n_labels = model.score.out_features
    if published.n_labels == n_labels:
        return published.labels
    return [f"LABEL_{i}" for i in range(n_labels)]


def end_tokens(
    model: CausalLM, tokenizer: Tokenizer | None = None, published: Published = NOTHING
) -> list[int]:
    """The tokens with which a text of this model ends: those that ``generation_config.json`` names,
    else the config, else the tokenizer. What the vocabulary does not have does not count."""
    for ids in (
        published.generation_config.get("eos_token_id"),
        model.config.eos_token_id,
        tokenizer.eos_token_id if tokenizer else None,
    ):
        if there := [n for n in _ids(ids) if 0 <= n < model.config.vocab_size]:
            return there
    return []


def _ids(ids: Any) -> list[Any]:
    """One id or several as a list; none is an empty one."""
    return [] if ids is None else list(ids) if isinstance(ids, list | tuple) else [ids]
