"""``generate``: a model continues a text."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from lm_from_scratch.checkpoint.folders import local_folder
from lm_from_scratch.checkpoint.weights import from_pretrained
from lm_from_scratch.commands.options import (
    KERNELS_HELP,
    add_fields,
    device_named,
    given,
    not_empty,
    positive,
    use_kernels,
)
from lm_from_scratch.generation.beam_search import beam_search
from lm_from_scratch.generation.generate import complete, generate, generate_text, until
from lm_from_scratch.generation.logit_processors import no_repeat_ngram
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.weights.quantize import quantized_weights


def run(args: argparse.Namespace) -> int:
    """Load a model and print what it says, as it says it."""
    folder = local_folder(args.model)
    model = from_pretrained(folder).to(device_named(args.device))
    if not quantized_weights(model):  # whose kernels want the dtype of the file
        model.float()
    if args.kernels:
        use_kernels(model)
    tokenizer = tokenizer_of(folder)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, the model "
            f"{model.config.vocab_size}: they do not belong together"
        )
    sampler = Sampler(**{**DEFAULTS, **given(args, Sampler)})
    rules = [no_repeat_ngram(args.no_repeat_ngram)] if args.no_repeat_ngram else []
    end = tokenizer.eos_token_id
    prompt = [end, *tokenizer.encode(args.prompt)]
    room = model.config.block_size - len(prompt) + 1  # what it was trained for
    max_new_tokens = args.max_new_tokens or max(1, min(100, room))
    if args.num_beams:
        if args.stop:
            raise ValueError(
                f"--stop {args.stop[0]!r} is not for --num-beams, which ranks whole texts"
            )
        found = beam_search(
            model, [prompt], max_new_tokens, args.num_beams, args.length_penalty,
            num_return_sequences=args.num_return_sequences, stop_tokens=[end], processors=rules,
        )[0]  # fmt: skip
        for number, hypothesis in enumerate(found, start=1):
            text = tokenizer.decode([token for token in hypothesis.tokens if token != end])
            print(f"--- {number}, score {hypothesis.score:.3f}\n{args.prompt}{text}")
        return 0
    if args.num_return_sequences == 1:
        pieces = generate_text(
            model, tokenizer, args.prompt, max_new_tokens, sampler, args.seed, args.stop, rules
        )
        print(args.prompt, end="", flush=True)
        for text in pieces:
            print(text, end="", flush=True)
        print()
        return 0
    steps = generate(
        model, [prompt], max_new_tokens, sampler, [end], args.num_return_sequences, args.seed,
        processors=rules,
    )  # fmt: skip
    for number, row in enumerate(complete(steps), start=1):
        text = tokenizer.decode([token for token in row if token != end])
        text = "".join(until([text], args.stop))
        print(f"--- {number}\n{args.prompt}{text}")
    return 0


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a model, which a run keeps beside its checkpoints."""
    for place in (folder, folder.parent):
        if (place / "tokenizer.json").is_file():
            return Tokenizer.load(place)
    raise ValueError(
        f"{folder} has no tokenizer.json: save_pretrained(model, folder, tokenizer) writes one"
    )


EXAMPLES = """examples
  python -m lm_from_scratch generate --prompt "Return the number of"
  python -m lm_from_scratch generate --prompt "json.dumps(obj)" --temperature 0
  python -m lm_from_scratch generate --model qwen2-docs --prompt "class Stack:"
  python -m lm_from_scratch generate --prompt "The" --num-beams 4 --no-repeat-ngram 3
  python -m lm_from_scratch generate --prompt "The" --stop $'\\n\\n' "Note:"
  python -m lm_from_scratch generate --model path/or/hub-name --prompt "Hello" --top-p 0.9

how to choose
  temperature   0 always takes the likeliest token; 1 draws from the model's own distribution
  top-k, top-p  cut the tail of unlikely tokens off: by number, by probability
  num-beams     the likeliest text instead of a drawn one: short, safe, often repetitive
  min-p         cut off what is less likely than this share of the likeliest token
  typical-p     keep the tokens whose surprise is nearest to the mean
"""
#: What is not as the dataclass has it: that draws from the model's own distribution.
DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}


def add_options(p: argparse.ArgumentParser) -> None:
    """A model, a prompt, and how the next tokens are chosen."""
    p.description, p.epilog = "Let a model continue a text.", EXAMPLES
    p.add_argument(
        "--model",
        type=not_empty,
        default="gpt2-docs",
        help="gpt2-docs or qwen2-docs, which come with the package (default: gpt2-docs), "
        "or a folder, or a name on the hub",
    )
    p.add_argument("--prompt", default="", help="text to continue; default: a new document")
    p.add_argument("--max-new-tokens", type=positive, help="default: 100, or what fits the model")
    add_fields(p, Sampler, [field.name for field in fields(Sampler)], **DEFAULTS)
    p.add_argument("--no-repeat-ngram", type=int, default=0, help="0 is off; default: 0")
    p.add_argument("--stop", nargs="+", default=[], metavar="TEXT", help="end before one of these")
    p.add_argument("--num-return-sequences", type=int, default=1, help="default: 1")
    p.add_argument(
        "--num-beams",
        type=int,
        default=0,
        help="beam search, which draws nothing, so what bends the draw has no effect; 0 is off",
    )
    p.add_argument("--length-penalty", type=float, default=1.0, help="of beam search; default: 1")
    p.add_argument("--seed", type=int, default=0, help="same seed, same text; default: 0")
    p.add_argument("--device", default="cpu", help="cpu or cuda; default: cpu")
    p.add_argument("--kernels", action="store_true", help=KERNELS_HELP)
