"""What each command takes: a frozen dataclass of options, a description, examples.

What ``train`` takes is in ``train_options`` and ``presets``.
"""

import re
from argparse import ArgumentTypeError
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from lm_from_scratch.commands.fields import Command, Name, NoOptions, Options, option
from lm_from_scratch.commands.presets import TRAIN
from lm_from_scratch.limits import Count, Whole

SHIPPED = "gpt2-docs, qwen2-docs, tasks or worlds"


# ------------------------------------------------------------------------- a model that answers


@dataclass(frozen=True, kw_only=True)
class SpeedOptions(Options):
    """How a model computes that only answers."""

    device: str = option("cpu or cuda", "cpu")
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto: float32, or bfloat16 if the model is stored so and is measured to be faster", "auto"
    )
    layout: Literal["measured", "rows", "columns", "packed", "off"] = option(
        "how weights lie in memory: what is measured to be the fastest, or one for all, or off: as "
        "they come",
        "measured",
    )


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(SpeedOptions):
    """A model, a prompt, and how the next tokens are chosen."""

    model: Name = option(f"{SHIPPED}, which come with the package, or a folder, or a name on the "
                         "hub", "gpt2-docs")  # fmt: skip
    prompt: str = option("text to continue; default: a new document", "")
    prompts: Name | None = option(
        "many texts to continue, one a line, together; - reads them from the input", None,
        metavar="FILE",
    )  # fmt: skip
    start: Literal["rule", "end", "nothing"] = option(
        "what stands in front of the prompt: what the tokenizer's rule says, the end token, as "
        "between documents, or nothing",
        "rule",
    )
    ignore_eos: bool = option("go on after an end token, to --max-new-tokens", False)
    chat: bool = option(
        "turns from the terminal, by the tokenizer's chat template; Ctrl-C ends an answer, Ctrl-D "
        "the chat",
        False,
    )
    system: str = option("of a chat: what it is told first", "", metavar="TEXT")
    max_new_tokens: Count | None = option(
        "default: 100, in a chat 1000, or what fits the model", None
    )
    temperature: float | None = option("0 is greedy: the likeliest token; default: 0.8", None)
    top_k: int | None = option("0 is off; default: 0", None)
    top_p: float | None = option("1 is off; default: 0.95", None)
    min_p: float | None = option("0 is off; default: 0", None)
    typical_p: float | None = option("1 is off; default: 1", None)
    repetition_penalty: float | None = option("1 is off; default: 1", None)
    no_repeat_ngram: Whole | None = option("0 is off; default: 0", None)
    stop: tuple[str, ...] = option("end before one of these", (), metavar="TEXT")
    num_return_sequences: int = option("how many texts", 1)
    num_beams: Whole = option(
        "beam search, which draws nothing, so what bends the draw has no effect; 0 is off", 0
    )
    length_penalty: float = option("of beam search", 1.0)
    seed: Whole = option("same seed, same text", 0)
    draft: Name | None = option(
        "a smaller model with the same tokens proposes some, several of which --model judges at "
        "once: the same distribution, perhaps sooner", None, metavar="FOLDER",
    )  # fmt: skip
    kernels: bool = option("compute with Triton kernels, on a CUDA device", False)

    def __post_init__(self) -> None:
        """Refuses what means nothing together."""
        super().__post_init__()
        if self.num_beams and self.stop:
            raise ValueError(
                f"--stop {self.stop[0]!r} is not for --num-beams, which ranks whole texts"
            )
        if self.system and not self.chat:
            raise ValueError(f"--system {self.system!r} is for --chat")
        many = "--chat" if self.chat else "--prompts" if self.prompts else ""
        for name, off in (("prompt", ""), ("num_beams", 0), ("num_return_sequences", 1)):
            if many and (value := vars(self)[name]) != off:
                raise ValueError(f"{self.flag(name)} {value} is not for {many}")
        for name, is_so in (("prompts", self.prompts), ("num_beams", self.num_beams),
                            ("num_return_sequences", self.num_return_sequences > 1)):  # fmt: skip
            if self.draft and is_so:
                raise ValueError(f"--draft {self.draft} is not for {self.flag(name)}")
        if self.chat and self.prompts:
            raise ValueError(f"--prompts {self.prompts} is not for --chat")


GENERATE = Command(
    "let a model continue a text",
    (GenerateOptions,),
    "lm_from_scratch.commands.generate:run",
    description="Let a model continue a text, or talk to one. A text begins as the tokenizer's own "
    "rule\nsays, and ends at the end tokens that the model's folder names; --start and "
    "--ignore-eos\nchange that. How a token is chosen, the options say; what they leave open, the "
    "folder's\ngeneration_config.json (do_sample, temperature, top_k and so on, as transformers "
    "reads\nthem); what it leaves open, the defaults below. How many, the options alone say.",
    examples="""examples
  python -m lm_from_scratch generate --prompt "Return the number of"
  python -m lm_from_scratch generate --prompt "json.dumps(obj)" --temperature 0
  python -m lm_from_scratch generate --model qwen2-docs --prompt "class Stack:"
  python -m lm_from_scratch generate --model tasks --prompt "add:47+38=" --temperature 0
  python -m lm_from_scratch generate --prompt "The" --num-beams 4 --no-repeat-ngram 3
  python -m lm_from_scratch generate --prompt "The" --stop $'\\n\\n' "Note:"
  python -m lm_from_scratch generate --prompts beginnings.txt --max-new-tokens 40
  python -m lm_from_scratch generate --model path/or/hub-name --prompt "Hello" --top-p 0.9
  python -m lm_from_scratch generate --model path/or/hub-name --chat --system "Answer in verse."

how to choose
  temperature   0 always takes the likeliest token; 1 draws from the model's own distribution
  top-k, top-p  cut the tail of unlikely tokens off: by number, by probability
  num-beams     the likeliest text instead of a drawn one: short, safe, often repetitive
  min-p         cut off what is less likely than this share of the likeliest token
  typical-p     keep the tokens whose surprise is nearest to the mean
""",
)


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions(SpeedOptions):
    """A classifier, and texts."""

    texts: tuple[str, ...] = option("a text to label", (), positional=True,
                                    metavar="TEXT")  # fmt: skip
    model: Name = option("a folder, or a name on the hub")
    file: Name | None = option("with a text in each line; - is what is typed or piped", None)
    quiet: bool = option("no progress bar", False)


CLASSIFY = Command(
    "let a model label texts",
    (ClassifyOptions,),
    "lm_from_scratch.commands.classify:run",
    description="Label texts with a classifier of any family that can be opened.",
    examples="""examples
  python -m lm_from_scratch classify --model run/model "the parcel never came"
  python -m lm_from_scratch classify --model path/or/hub-name --file mails.txt > labels.tsv

what is printed for each text, a line for each line of the file
  a label, a tab, and how sure the model is; of a model whose labels exclude nothing (multi-label)
  all labels so; of one that gives numbers (regression) the numbers. train --classify makes models
  that give one label.
""",
)


# ---------------------------------------------------------------------------- a model made anew


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(Options):
    """A model, a folder for the new one, and what it holds."""

    model: Name = option(f"{SHIPPED}, or a folder, or a name on the hub", positional=True)
    out: Name = option("folder of the new model")
    bits: Literal[8, 4] = option("of a weight", 8)
    group_size: Count | None = option(
        "numbers that share a scale; default: a row with 8 bits, 64 with 4", None
    )
    weight_only: bool = option(
        "with 8 bits: do not round activations; as fast for one token, slower for many", False
    )
    dtype: Literal["bfloat16", "float16", "float32"] = option(
        "of scales, of all other weights and of products; default: bfloat16, which is fastest",
        "bfloat16",
    )


QUANTIZE = Command(
    "write a model with weights of 8 or 4 bits",
    (QuantizeOptions,),
    "lm_from_scratch.commands.quantize:run",
    description="Write a model with weights of 8 or 4 bits, which generate --model reads.",
    examples="""examples
  python -m lm_from_scratch quantize gpt2-docs --bits 8 --out build/int8
  python -m lm_from_scratch quantize path/or/hub-name --bits 4 --group-size 32 --out build/int4
""",
)

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def size(text: str) -> int:
    """An option's value that must be a number of bytes, like 500M or 2GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", text.upper())
    bytes_ = int(Fraction(match[1]) * UNITS[match[2]]) if match else 0
    if bytes_ < 1:
        raise ArgumentTypeError(f"{text!r} is no size like 500M or 2GB")
    return bytes_


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(Options):
    """A model, a folder for the new one, and what changes."""

    model: Name = option("a folder, or a name on the hub", positional=True)
    out: Name = option("folder of the new model")
    dtype: Literal["bfloat16", "float16", "float32", "float64"] | None = option(
        "of the weights; default: as they are", None
    )
    max_shard: int = option(
        "largest file of weights, like 500M or 2GB (K is 1000; a tensor stays whole); default: 5GB",
        5 * UNITS["G"], type=size, metavar="SIZE",
    )  # fmt: skip
    merge: bool = option(
        "of a model with an adapter (LoRA), beside it or alone in its folder: add it to the "
        "weights", False,
    )  # fmt: skip
    quiet: bool = option("no progress bar", False)


CONVERT = Command(
    "write a model in another dtype, in smaller files, or with its adapter added",
    (ConvertOptions,),
    "lm_from_scratch.commands.convert:run",
    description="Write a model, or a classifier, in another dtype or in files of another size, "
    "with its\ntokenizer, its chat templates and all that its config files say; other files, a "
    "README\nsay, stay behind. quantize makes weights of 8 or 4 bits.",
    examples="""examples
  python -m lm_from_scratch convert path/or/hub-name --dtype bfloat16 --out build/half
  python -m lm_from_scratch convert run/model --max-shard 200M --out build/parts
  python -m lm_from_scratch convert run/model --merge --out build/merged
""",
)


# -------------------------------------------------------------------------- what is there, here


@dataclass(frozen=True, kw_only=True)
class DescribeOptions(Options):
    """A folder, or the file itself."""

    model: Name = option("a folder with a config.json, or such a file", positional=True)


DESCRIBE = Command(
    "which ideas the model of a config.json uses",
    (DescribeOptions,),
    "lm_from_scratch.commands.describe:run",
    description="Say which ideas a model uses, with the keys of its config.json that say so, and "
    "the page\nof the course on each. The weights are not read, and the model need not be one that "
    "this\npackage can load.",
    examples="""examples
  python -m lm_from_scratch describe qwen2-docs
  python -m lm_from_scratch describe path/to/model
  python -m lm_from_scratch describe downloads/config.json
""",
)


COMMANDS = {
    "train": TRAIN,
    "generate": GENERATE,
    "classify": CLASSIFY,
    "quantize": QUANTIZE,
    "convert": CONVERT,
    "describe": DESCRIBE,
    "doctor": Command(
        "what runs here, and how to fix what does not",
        (NoOptions,),
        "lm_from_scratch.commands.doctor:run",
    ),
}
