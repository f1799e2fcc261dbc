"""What ``train`` takes: a dataclass for each way to learn, and those that all ways share.

:class:`TrainOptions` is all of a run: where it lives, the model that it begins with, its steps, and
the way in which it learns. ``presets`` makes one from the command line.
"""

from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal

from lm_from_scratch.commands.fields import Name, Options, option, plain
from lm_from_scratch.limits import Count, NotNegative, Positive, Share, Whole
from lm_from_scratch.optim.config import (
    NUMBERS_OF,
    Basis,
    Moments,
    Optimizer,
    OptimizerConfig,
    ProjectionType,
)
from lm_from_scratch.text.corpora import CORPORA
from lm_from_scratch.text.tasks import TASKS

# -------------------------------------------------------------------------------- ways to learn


@dataclass(frozen=True, kw_only=True)
class TokenLoss(Options):
    """What learns the next token, whose logits are many."""

    chunked_loss: bool = option("a step never holds its logits: for large vocabularies", False)


@dataclass(frozen=True, kw_only=True)
class Pretrain(TokenLoss):
    """To continue texts."""

    corpus: tuple[Name, ...] = option(
        f"{', '.join(CORPORA)}, or a file or folder of text, of which whole files are held out, "
        "and pieces of a large one; NAME*3 repeats it three times",
        metavar="TEXT",
    )
    no_isolate: bool = option("let packed documents see each other", False)
    kernels: bool = option("compute with Triton kernels, on a CUDA device", False)


@dataclass(frozen=True, kw_only=True)
class Classify(Options):
    """To label texts."""

    classify: Name = option(
        "learn to label texts: a file of lines TEXT<tab>LABEL (a first line that says label is "
        "left out), or of objects with text and label (.jsonl)",
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class Sft(TokenLoss):
    """To answer questions."""

    GROUP: ClassVar[str] = "after pretraining, with --from: answers"
    sft: Name = option(
        'learn the answers of a .jsonl file: lines {"messages": [...]} of a chat, or '
        '{"prompt": ..., "completion": ...}',
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class Dpo(Options):
    """To give the better of two answers."""

    GROUP: ClassVar[str] = "after pretraining, with --from: preferences"
    dpo: Name = option(
        'learn which answer is better: lines {"prompt": ..., "chosen": ..., "rejected": ...}',
        metavar="FILE",
    )
    beta: Positive = option("of --dpo: how near it stays", 0.1)


@dataclass(frozen=True, kw_only=True)
class Grpo(Options):
    """To give answers that are judged right."""

    GROUP: ClassVar[str] = "after pretraining, with --from: rewards"
    grpo: tuple[Name, ...] = option(
        f"learn from rewards for right answers: {', '.join(TASKS)}, or a file as for --sft, whose "
        "answers are the right ones",
        metavar="TASK",
    )
    group_size: Count = option("of --grpo: answers to each question, of --batch-size in all", 8)
    kl: NotNegative = option("of --grpo: how strongly it is held near the model of --from", 0.0)
    max_new_tokens: Count = option("of --grpo: the longest answer", 32)


#: The ways by the option that says so; without one, a run continues texts.
WAYS: dict[str, type[Options]] = {"sft": Sft, "dpo": Dpo, "grpo": Grpo, "classify": Classify}


# -------------------------------------------------------------------------- what all ways share


@dataclass(frozen=True, kw_only=True)
class NewModel(Options):
    """A model, and a tokenizer, that begin from nothing."""

    architecture: Literal["gpt2", "qwen2"] = option("of the model", "gpt2")
    vocab_size: Count = option("tokens of the tokenizer that is made here")
    n_layer: Count = option("blocks")
    n_head: Count = option("query heads in each block")
    n_kv_head: Count | None = option(
        "key-value heads; default: n-head, and only qwen2 has it", None
    )
    n_embd: Count = option("width of the residual stream")
    intermediate_size: Count | None = option(
        "width of the MLP; default: 4 * n-embd, of qwen2 3 * n-embd", None
    )
    initializer_range: Positive | None = option(
        "standard deviation of new weights; default: 0.02", None
    )
    tokenizer: Name | None = option("a tokenizer.json to use instead of training one", None)
    chat_tokens: bool = option(
        "a tokenizer that is made here gets the special tokens of a chat and a template", False
    )


@dataclass(frozen=True, kw_only=True)
class FromFolder(Options):
    """A model that has learned already."""

    from_: Name = option(
        "begin with this model and its tokenizer: a folder, or a name on the hub",
        metavar="FOLDER",
    )
    lora: Count | None = option(
        "train adapters of this rank beside its weights, which stay as they are; what is saved is "
        "a folder that peft opens. They bear ten times the --lr",
        None, metavar="RANK",
    )  # fmt: skip
    lora_alpha: Positive | None = option(
        "of --lora: what they add is multiplied by alpha / rank; default: 2 * rank", None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_alpha is not None and self.lora is None:
            raise ValueError(f"--lora-alpha {self.lora_alpha} is for --lora")


@dataclass(frozen=True, kw_only=True)
class StepOptions(Options):
    """How it is trained: batches, learning rates, the optimizer."""

    block_size: Count = option("tokens in a row, and the longest text of a new model")
    dropout: Share | None = option("share of activations zeroed in training", None)
    batch_size: Count = option("rows in a batch, over all processes")
    grad_accumulation: Count = option("batches summed up before each step", 1)
    steps: Count = option("length of the run and of its schedule")
    lr: Positive = option("highest learning rate")
    min_lr: NotNegative = option("learning rate of the last step")
    warmup: Whole = option("steps until the highest learning rate")
    weight_decay: NotNegative = option(
        "shrinks matrices, not biases and norms", OptimizerConfig.weight_decay
    )
    optimizer: Optimizer = option("of the blocks' matrices", OptimizerConfig.optimizer)
    optim_bits: Literal[32, 8] = option(
        "of each number in the optimizer's moments: 32, or 8 for less memory",
        OptimizerConfig.optim_bits,
    )
    rank: Count | None = option("galore: directions of each matrix; default: n-embd / 4", None)
    update_proj_gap: Count | None = option(
        f"galore: steps for one basis; default: {OptimizerConfig.update_proj_gap}", None
    )
    scale: float | None = option(
        "galore: factor of the matrices' steps, so lr * scale is their rate; default: "
        f"{OptimizerConfig.scale}", None, flag="--galore-scale",
    )  # fmt: skip
    projection_type: ProjectionType | None = option(
        f"galore: which side of a matrix is projected; default: {OptimizerConfig.projection_type}",
        None,
    )
    moments: Moments | None = option(
        f"galore: what a new basis does to them; default: {OptimizerConfig.moments}", None
    )
    basis: Basis | None = option(f"galore: how it is found; default: {OptimizerConfig.basis}", None)
    muon_scale: Positive | None = option(
        f"muon: factor of the matrices' steps; default: {OptimizerConfig.muon_scale}", None
    )
    update_in_backward: bool = option(
        "step within the backward pass: less memory, no clipping", False
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "of the matrix products; auto: what is measured to be faster", "float32"
    )
    eval_every: Whole = option("steps between held-out losses; 0 is never")

    def __post_init__(self) -> None:
        super().__post_init__()
        for optimizer, names in NUMBERS_OF.items():
            for name in names:
                value = vars(self)[name]
                if value is not None and self.optimizer != optimizer:
                    raise ValueError(f"{self.flag(name)} {value} is for --optimizer {optimizer}")


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """How the run goes: folder, checkpoints, devices."""

    preset: Literal[
        "nano", "docs", "docs-qwen2", "tasks", "worlds", "finetune", "sft", "dpo", "grpo"
    ] = option("default: nano; with --from: finetune", "nano")
    out: Name = option("folder of the run")
    library: Literal["auto", "torch", "onednn"] = option(
        "of float32 products on a CPU; default: auto, what is measured to be faster", "auto"
    )
    checkpoint_every: Whole = option("steps; 0 is at the end alone", 100)
    held_out: float = option("share held out", 0.05)
    seed: Whole = option("of weights, data order and dropout", 0)
    device: str = option("cpu or cuda", "cpu")
    parallel: Literal["ddp", "fsdp"] | None = option(
        "under torchrun: ddp, a model in every process; fsdp, a share of it in each", None
    )
    quiet: bool = option("no progress bar", False)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """All of a run."""

    run: RunOptions
    model: NewModel | FromFolder
    steps: StepOptions
    way: Pretrain | Classify | Sft | Dpo | Grpo

    def __post_init__(self) -> None:
        if isinstance(self.way, Grpo) and self.run.parallel == "fsdp":
            raise ValueError(
                "--grpo needs the whole model in every process, to write answers with: give "
                "--parallel ddp"
            )
        if self.lora:
            for flag, is_so, way in (
                ("--classify", isinstance(self.way, Classify), "train --classify whole"),
                ("--parallel fsdp", self.run.parallel == "fsdp", "give --parallel ddp"),
            ):
                if is_so:
                    raise ValueError(f"--lora {self.lora} does not work with {flag}: {way}")
        if self.kernels and self.run.parallel:
            raise ValueError("--kernels and --parallel do not work together: give one of them")
        if self.steps.dtype == "auto":
            # the reference speaks before the choice, and must compute alike
            asks = "--dpo" if isinstance(self.way, Dpo) else "--kl"
            if isinstance(self.way, Dpo) or (isinstance(self.way, Grpo) and self.way.kl):
                raise ValueError(
                    f"--dtype auto is not for {asks}, whose reference is asked before the choice: "
                    "give --dtype float32 or bfloat16"
                )

    @property
    def lora(self) -> int | None:
        """The rank of adapters, if they alone are trained."""
        return self.model.lora if isinstance(self.model, FromFolder) else None

    @property
    def kernels(self) -> bool:
        """Whether the model computes with Triton kernels."""
        return isinstance(self.way, Pretrain) and self.way.kernels

    @property
    def chunked_loss(self) -> bool:
        """Whether a step never holds its logits."""
        return isinstance(self.way, TokenLoss) and self.way.chunked_loss

    def arguments(self) -> dict[str, Any]:
        """What the run keeps of them, by name: tuples as lists, as JSON has them."""
        parts = (self.run, self.model, self.steps, self.way)
        values = {name: value for part in parts for name, value in plain(part).items()}
        return {name: value for name, value in values.items() if name not in UNKEPT}


#: What a run does not keep: it may be another each time.
UNKEPT = {"out", "quiet", "device", "parallel"}
#: What a run that says nothing of an option has had.
DEFAULTS = {
    one.name: one.default
    for part in (RunOptions, NewModel, StepOptions, Pretrain, *WAYS.values())
    for one in fields(part)
    if one.default is not MISSING
}


def flag_of(name: str) -> str:
    """How the command line calls an argument of a run."""
    return StepOptions.flag("scale") if name == "scale" else "--" + name.replace("_", "-")
