"""What ``train`` trains, and on what: a tokenizer, a model, and batches, made from the options.

A model is new, or comes from a folder (``--from``); it continues texts, or classifies them
(``--classify``).
"""

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from lm_from_scratch.checkpoint.architectures import Config, build
from lm_from_scratch.checkpoint.configs import config_to_dict
from lm_from_scratch.checkpoint.folders import local_folder, read_json
from lm_from_scratch.checkpoint.published import NOTHING, Published, labels, read_published
from lm_from_scratch.checkpoint.state import SAID
from lm_from_scratch.checkpoint.weights import Checkpoint, load_checkpoint
from lm_from_scratch.commands.generate import check_together, tokenizer_of
from lm_from_scratch.commands.options import option, use_kernels
from lm_from_scratch.models.gpt2 import GPT2Config
from lm_from_scratch.models.heads import SequenceClassifier, TokenClassifier
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.models.modes import evaluating
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.runs.distributed import Processes
from lm_from_scratch.text.batch import Batch
from lm_from_scratch.text.batches import PackedBatches, sequential_batches, text_key, write_tokens
from lm_from_scratch.text.chatml import chat_tokenizer
from lm_from_scratch.text.corpora import load_split
from lm_from_scratch.text.labelled import LabelledBatches, read_labelled, split_labelled
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.dropout import residual_dropout_
from lm_from_scratch.training.objective import Objective
from lm_from_scratch.training.train import Batches
from lm_from_scratch.weights.quantize import quantized_weights

#: What a folder decides: options that make a new model.
SIZES = (
    "architecture", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "intermediate_size",
    "initializer_range", "tokenizer", "chat_tokens",
)  # fmt: skip


@dataclass
class Prepared:
    """All that a run begins with."""

    tokenizer: Tokenizer
    model: CausalLM | SequenceClassifier
    published: Published  # with the model that it begins from
    batches: Batches
    held_out: Sequence[Batch]
    said: str  # how much text there is
    loss: Callable[[CausalLM, str], Objective] | None = None  # if it is not that of the next token
    result: Callable[[Any], str] | None = None  # what is measured of the trained model at the end
    ask: str = "--prompt The"  # words for ``generate``, or ``classify``, that try what was trained


def refuse_sizes(args: argparse.Namespace) -> None:
    """Refuse options that a folder, or a file of labelled texts, decides."""
    given = vars(args)
    for name in SIZES:
        if "from" in given and given.get(name) is not None:
            raise ValueError(f"{option(name)} {given[name]} is not for --from: the folder says it")
    for name, off in (("corpus", None), ("kernels", False), ("chunked_loss", False)):
        if "classify" in given and given.get(name, off) not in (off, None):
            raise ValueError(f"{option(name)} is not for --classify")


def source_of(args: argparse.Namespace) -> Path | None:
    """The folder of the model to begin with, if it is not a new one."""
    return _found(vars(args)["from"]) if "from" in args else None


#: Found once: each time, a name on the hub asks the network.
_found = cache(local_folder)


def config_in(folder: Path) -> Config:
    """The sizes of a model on disk."""
    return read_published(folder)[1]


def continuation(out: Path, args: argparse.Namespace, group: Processes) -> Prepared:
    """A model that continues texts."""
    train_documents, held_out_documents = load_split(args.corpus, args.held_out)
    isolate = not args.no_isolate
    with group.first_alone():
        tokenizer = tokenizer_for(out, args, group, [d.text for d in train_documents])
        refuse_other_text(out, text_key(train_documents, tokenizer))
        checkpoint = model_of(args, tokenizer, group)
        if group.rank == 0:
            tokenizer.save(out)
        train_file = write_tokens(train_documents, tokenizer, out / "data" / "train.bin")
        held_out_file = write_tokens(held_out_documents, tokenizer, out / "data" / "held_out.bin")
    batches = PackedBatches(train_file, args.batch_size, args.block_size, args.seed, isolate)
    held_out = list(sequential_batches(held_out_file, args.batch_size, args.block_size, isolate))
    said = (
        f"{len(train_documents)} documents, {train_file.n_tokens} tokens for training, "
        f"{held_out_file.n_tokens} held out"
    )
    return Prepared(tokenizer, checkpoint.model, checkpoint.published, batches, held_out, said)


def classification(out: Path, args: argparse.Namespace, group: Processes) -> Prepared:
    """A model that classifies texts."""
    rows = read_labelled(args.classify)
    sides = split_labelled(rows, args.held_out)
    with group.first_alone():
        tokenizer = tokenizer_for(out, args, group, [row.text for row in sides[0]])
        checkpoint = model_of(args, tokenizer, group, sorted({row.label for row in rows}))
        model, names = checkpoint.model, labels(checkpoint.model, checkpoint.published)
        assert isinstance(model, SequenceClassifier)
        sizes = (args.batch_size, args.block_size, args.seed)
        try:
            batches = LabelledBatches(sides[0], names, tokenizer, *sizes)
            rows_at_once = min(args.batch_size, len(sides[1]))
            held_out = LabelledBatches(sides[1], names, tokenizer, rows_at_once, args.block_size)
        except ValueError as error:
            raise ValueError(f"{args.classify}: {error}") from error
        refuse_other_text(out, batches.key)
        if group.rank == 0:
            tokenizer.save(out)
    said = f"{len(sides[0])} texts of {len(batches.labels)} labels, {len(sides[1])} held out"
    evaluated, text = list(held_out.each_once()), sides[1][0].text
    ask = shlex.quote(text if len(text) <= 200 and not text.startswith("-") else "a text")
    result = partial(accuracy, batches=evaluated)
    return Prepared(
        tokenizer, model, checkpoint.published, batches, evaluated, said, result=result, ask=ask
    )


def accuracy(model: SequenceClassifier, batches: Sequence[Batch]) -> str:
    """How many of the texts get the label that they have."""
    with evaluating(model):
        right = [
            int((model(b.idx, positions=b.positions).argmax(1) == b.targets).sum()) for b in batches
        ]
    total = sum(len(batch.targets) for batch in batches)
    return f"held-out accuracy: {sum(right)} of {total} texts, {sum(right) / total:.0%}"


def tokenizer_for(
    out: Path, args: argparse.Namespace, group: Processes, texts: Sequence[str]
) -> Tokenizer:
    """The tokenizer of the run: its own if it goes on, else that of the folder or the option, else
    one that is made for the texts."""
    source = source_of(args)
    if (out / "recipe.json").is_file() or (group.rank > 0 and source is None):  # it is there
        return Tokenizer.load(out)
    if source is not None:
        return tokenizer_of(source)
    if args.tokenizer:
        return Tokenizer.load(args.tokenizer)
    made = chat_tokenizer if getattr(args, "chat_tokens", False) else Tokenizer.train
    return made(texts, args.vocab_size)


def refuse_other_text(out: Path, key: str) -> None:
    """Refuse to go on with a run whose text, or tokenizer, is no longer what it was."""
    recipe = out / "recipe.json"
    if recipe.is_file() and read_json(recipe).get("text", key) != key:
        raise ValueError(f"{SAID['text']}, in {out}: give it the text it had, or another --out")


def model_of(
    args: argparse.Namespace, tokenizer: Tokenizer, group: Processes, names: Sequence[str] = ()
) -> Checkpoint[Any]:
    """The model of the run, with all that the options put into it, and what is published with it;
    with ``names`` of labels, a classifier."""
    torch.manual_seed(args.seed)
    source = source_of(args)
    model: Any
    if source is None:
        model, published = build(model_config_of(args, tokenizer)), NOTHING
    else:
        checkpoint = model_from(source, args, tokenizer, bool(names))
        model, published = checkpoint.model, checkpoint.published
    dropout = getattr(args, "dropout", 0.0)
    if isinstance(model, Qwen2ForCausalLM):
        residual_dropout_(model, dropout)
    if names and not isinstance(model, SequenceClassifier):
        base = published.config or config_to_dict(model.config)
        model = SequenceClassifier(model.backbone, len(names))
        named = {
            "id2label": {str(i): name for i, name in enumerate(names)},
            "label2id": {name: i for i, name in enumerate(names)},
        }
        published = Published({**base, **named})
    if group.parallel is None:  # otherwise each process takes its share there
        model.to(args.device)
    if args.kernels:
        use_kernels(model)
    return Checkpoint(model, published)


def model_from(
    source: Path, args: argparse.Namespace, tokenizer: Tokenizer, classify: bool
) -> Checkpoint[Any]:
    """The model in a folder, in float32, with the dropout that is asked for."""
    checkpoint = load_checkpoint(source)
    model = checkpoint.model
    config = model.backbone.config
    if isinstance(model, TokenClassifier) or (
        isinstance(model, SequenceClassifier) and not classify
    ):
        raise ValueError(
            f"{source} holds a {type(model).__name__}: --classify goes on with one that labels "
            "texts, and without it a model of texts is needed"
        )
    problem = checkpoint.published.config.get("problem_type")
    if classify and problem not in (None, "single_label_classification"):
        raise ValueError(f"{source} is for {problem}; --classify gives every text one label")
    if quantized_weights(model):
        raise ValueError(f"{source} has quantised weights, which cannot be trained")
    check_together(tokenizer, config, source)
    if args.block_size > config.block_size:
        raise ValueError(
            f"--block-size {args.block_size} (given, or of the preset) is more than the "
            f"{config.block_size} tokens that {source} reads"
        )
    if isinstance(config, GPT2Config) and "dropout" in args:
        other = replace(config, embd_pdrop=args.dropout, resid_pdrop=args.dropout, attn_pdrop=0.0)
        new: Any = build(other)
        if isinstance(model, SequenceClassifier):
            new = SequenceClassifier(new.backbone, model.score.out_features)
        new.load_state_dict(model.state_dict())
        model = new
    return Checkpoint(model.float(), checkpoint.published)


def model_config_of(args: argparse.Namespace, tokenizer: Tokenizer) -> Config:
    """The new model that the options describe."""
    sizes: dict[str, Any] = dict(
        vocab_size=tokenizer.vocab_size,
        block_size=args.block_size,
        n_layer=args.n_layer,
        n_head=args.n_head,
        n_embd=args.n_embd,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    for name in ("intermediate_size", "initializer_range"):
        if hasattr(args, name):
            sizes[name] = getattr(args, name)
    if args.architecture == "qwen2":
        sizes.setdefault("intermediate_size", 3 * args.n_embd)
        n_kv_head = getattr(args, "n_kv_head", args.n_head)
        return Qwen2Config(n_kv_head=n_kv_head, rope_theta=10000.0, **sizes)
    if hasattr(args, "n_kv_head"):
        raise ValueError(
            f"--n-kv-head {args.n_kv_head} (given, or of the preset) is for --architecture qwen2"
        )
    dropout = args.dropout
    return GPT2Config(embd_pdrop=dropout, resid_pdrop=dropout, attn_pdrop=0.0, **sizes)
