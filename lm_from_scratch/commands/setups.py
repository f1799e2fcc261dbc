"""What ``train`` trains, and on what: a tokenizer, a model, and batches, made from the options.

A model is new, or comes from a folder (``--from``); it continues texts, or classifies them
(``--classify``).
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from lm_from_scratch.checkpoint.architectures import Config, build
from lm_from_scratch.checkpoint.configs import config_to_dict
from lm_from_scratch.checkpoint.folders import ADAPTER, local_folder, read_json, shipped
from lm_from_scratch.checkpoint.published import NOTHING, Published, labels, read_published
from lm_from_scratch.checkpoint.state import DIFFERENCES
from lm_from_scratch.checkpoint.weights import Checkpoint
from lm_from_scratch.commands.loading import about, check_together, tokenizer_of, use_kernels
from lm_from_scratch.commands.train_options import (
    Classify,
    FromFolder,
    NewModel,
    Pretrain,
    StepOptions,
    TrainOptions,
)
from lm_from_scratch.interop.peft import base_folder, load_with_adapter
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
from lm_from_scratch.weights.lora import add_lora_
from lm_from_scratch.weights.quantize import quantized_weights

B = TypeVar("B", bound=Batches)


@dataclass
class Setup:
    """All that a run begins with."""

    tokenizer: Tokenizer
    model: CausalLM | SequenceClassifier
    published: Published  # with the model that it begins from
    batches: Batches
    held_out: Sequence[Batch]
    summary: str  # how much text there is
    loss: Callable[[CausalLM, str], Objective] | None = None  # if it is not that of the next token
    result: Callable[[Any], str] | None = None  # what is measured of the trained model at the end
    ask: str = "--prompt The"  # words for ``generate``, or ``classify``, that try what was trained


@cache
def source_of(start: FromFolder) -> Path:
    """The folder of a model; found once, since each time a name on the hub asks the network."""
    return local_folder(start.from_)


def name_of(start: FromFolder) -> str:
    """By which a model is found again, from any folder: its path, or its name on the hub."""
    here = Path(start.from_).is_dir() or start.from_ in shipped()
    return str(source_of(start).resolve()) if here else start.from_


def config_in(start: FromFolder) -> Config:
    """The sizes of a model on disk."""
    return read_published(base_folder(source_of(start)))[1]


def continuation(out: Path, options: TrainOptions, way: Pretrain, group: Processes) -> Setup:
    """A model that continues texts."""
    run, steps, isolate = options.run, options.steps, not way.no_isolate
    train_documents, held_out_documents = load_split(way.corpus, run.held_out)
    with group.first_alone():
        tokenizer = tokenizer_for(out, options, group, [d.text for d in train_documents])
        refuse_other_text(out, text_key(train_documents, tokenizer))
        checkpoint = model_of(options, tokenizer, group)
        if group.rank == 0:
            tokenizer.save(out)
        train_file = write_tokens(train_documents, tokenizer, out / "data" / "train.bin")
        held_out_file = write_tokens(held_out_documents, tokenizer, out / "data" / "held_out.bin")
    batches = PackedBatches(train_file, steps.batch_size, steps.block_size, run.seed, isolate)
    held_out = list(sequential_batches(held_out_file, steps.batch_size, steps.block_size, isolate))
    summary = (
        f"{len(train_documents)} documents, {train_file.n_tokens} tokens for training, "
        f"{held_out_file.n_tokens} held out"
    )
    return Setup(tokenizer, checkpoint.model, checkpoint.published, batches, held_out, summary)


def classification(out: Path, options: TrainOptions, way: Classify, group: Processes) -> Setup:
    """A model that classifies texts."""
    rows = read_labelled(way.classify)
    sides = split_labelled(rows, options.run.held_out)
    with group.first_alone():
        tokenizer = tokenizer_for(out, options, group, [row.text for row in sides[0]])
        checkpoint = model_of(options, tokenizer, group, sorted({row.label for row in rows}))
        model, names = checkpoint.model, labels(checkpoint.model, checkpoint.published)
        assert isinstance(model, SequenceClassifier)
        make = partial(LabelledBatches, labels=names, tokenizer=tokenizer)
        batches, held_out = batches_of(way.classify, sides, options, make)
        refuse_other_text(out, batches.key)
        if group.rank == 0:
            tokenizer.save(out)
    summary = f"{len(sides[0])} texts of {len(batches.labels)} labels, {len(sides[1])} held out"
    evaluated, text = list(held_out.each_once()), sides[1][0].text
    ask = shlex.quote(text if len(text) <= 200 and not text.startswith("-") else "a text")
    result = partial(accuracy, batches=evaluated)
    return Setup(
        tokenizer, model, checkpoint.published, batches, evaluated, summary, result=result, ask=ask
    )


def batches_of(
    file: str,
    sides: tuple[Sequence[Any], Sequence[Any]],
    options: TrainOptions,
    make: Callable[..., B],
) -> tuple[B, B]:
    """Those to learn from, and those held out, of which a batch may have fewer rows."""
    size, block_size = options.steps.batch_size, options.steps.block_size
    with about(file):
        learn = make(sides[0], batch_size=size, block_size=block_size, seed=options.run.seed)
        few = min(size, len(sides[1]))
        return learn, make(sides[1], batch_size=few, block_size=block_size)


def accuracy(model: SequenceClassifier, batches: Sequence[Batch]) -> str:
    """How many of the texts get the label that they have."""
    with evaluating(model):
        right = [
            int((model(b.idx, positions=b.positions).argmax(1) == b.targets).sum()) for b in batches
        ]
    total = sum(len(batch.targets) for batch in batches)
    return f"held-out accuracy: {sum(right)} of {total} texts, {sum(right) / total:.0%}"


def tokenizer_for(
    out: Path, options: TrainOptions, group: Processes, texts: Sequence[str]
) -> Tokenizer:
    """The tokenizer of the run: its own if it goes on, else that of the folder or the option, else
    one that is made for the texts."""
    new = options.model
    if (out / "recipe.json").is_file() or (group.rank > 0 and isinstance(new, NewModel)):
        return Tokenizer.load(out)  # it is there
    if isinstance(new, FromFolder):
        return tokenizer_of(source_of(new))
    if new.tokenizer:
        return Tokenizer.load(new.tokenizer)
    learn = chat_tokenizer if new.chat_tokens else Tokenizer.train
    return learn(texts, new.vocab_size)


def refuse_other_text(out: Path, key: str) -> None:
    """Refuse to go on with a run whose text, or tokenizer, is no longer what it was."""
    recipe = out / "recipe.json"
    if recipe.is_file() and read_json(recipe).get("text", key) != key:
        raise ValueError(
            f"{DIFFERENCES['text']}, in {out}: give it the text it had, or another --out"
        )


def model_of(
    options: TrainOptions, tokenizer: Tokenizer, group: Processes, names: Sequence[str] = ()
) -> Checkpoint[Any]:
    """The model of the run, with all that the options put into it, and what is published with it;
    with ``names`` of labels, a classifier."""
    torch.manual_seed(options.run.seed)
    model: Any
    if isinstance(options.model, NewModel):
        config = model_config_of(options.model, options.steps, tokenizer)
        model, published = build(config), NOTHING
    else:
        source = source_of(options.model)
        lora = bool(options.lora)
        checkpoint = model_from(source, options.steps, tokenizer, bool(names), lora)
        model, published = checkpoint.model, checkpoint.published
    if isinstance(model, Qwen2ForCausalLM):
        residual_dropout_(model, options.steps.dropout or 0.0)
    if names and not isinstance(model, SequenceClassifier):
        base = {**(published.config or config_to_dict(model.config))}
        base.pop("num_labels", None)  # it would go before the names
        model = SequenceClassifier(model.backbone, len(names))
        named = {
            "id2label": {str(i): name for i, name in enumerate(names)},
            "label2id": {name: i for i, name in enumerate(names)},
        }
        published = Published({**base, **named})
    if group.parallel is None:  # otherwise each process takes its share there
        model.to(options.run.device)
    if options.kernels:
        use_kernels(model)
    if isinstance(options.model, FromFolder) and (rank := options.model.lora):
        if (source / ADAPTER).is_file():
            raise ValueError(
                f"{source} has an adapter already: convert --merge makes a model of both, which "
                "--lora can begin with"
            )
        with about(f"--lora {rank}"):
            add_lora_(model, rank, options.model.lora_alpha or 2 * rank, seed=options.run.seed)
    return Checkpoint(model, published)


def model_from(
    source: Path, steps: StepOptions, tokenizer: Tokenizer, classify: bool, lora: bool
) -> Checkpoint[Any]:
    """The model in a folder, in float32, with the dropout that is asked for."""
    checkpoint = load_with_adapter(source)
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
    if quantized_weights(model) and not lora:
        raise ValueError(
            f"{source} has quantised weights, which cannot be trained; beside them --lora can"
        )
    check_together(tokenizer, config, source)
    if steps.block_size > config.block_size:
        raise ValueError(
            f"--block-size {steps.block_size} (given, or of the preset) is more than the "
            f"{config.block_size} tokens that {source} reads"
        )
    dropout = steps.dropout
    if isinstance(config, GPT2Config) and dropout is not None:
        other = replace(config, embd_pdrop=dropout, resid_pdrop=dropout, attn_pdrop=0.0)
        new: Any = build(other)
        if isinstance(model, SequenceClassifier):
            new = SequenceClassifier(new.backbone, model.score.out_features)
        new.load_state_dict(model.state_dict())
        model = new
    if quantized_weights(model) and model.head.weight.dtype != torch.float32:
        raise ValueError(
            f"{source} computes in {model.head.weight.dtype}, where adapters learn too coarsely: "
            "quantize --dtype float32 writes one that does not"
        )
    return Checkpoint(model.float(), checkpoint.published)


def model_config_of(new: NewModel, steps: StepOptions, tokenizer: Tokenizer) -> Config:
    """The new model that the options describe."""
    sizes: dict[str, Any] = dict(
        vocab_size=tokenizer.vocab_size,
        block_size=steps.block_size,
        n_layer=new.n_layer,
        n_head=new.n_head,
        n_embd=new.n_embd,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    if new.initializer_range is not None:
        sizes["initializer_range"] = new.initializer_range
    if new.architecture == "qwen2":
        sizes["intermediate_size"] = new.intermediate_size or 3 * new.n_embd
        return Qwen2Config(n_kv_head=new.n_kv_head or new.n_head, rope_theta=10000.0, **sizes)
    if new.n_kv_head is not None:
        raise ValueError(
            f"--n-kv-head {new.n_kv_head} (given, or of the preset) is for --architecture qwen2"
        )
    dropout = steps.dropout or 0.0
    return GPT2Config(
        embd_pdrop=dropout, resid_pdrop=dropout, attn_pdrop=0.0,
        intermediate_size=new.intermediate_size, **sizes,
    )  # fmt: skip
