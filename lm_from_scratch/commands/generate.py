"""``generate``: a model continues a text."""

import argparse
import itertools
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lm_from_scratch.cache.paged import BlockPool
from lm_from_scratch.checkpoint.architectures import Config
from lm_from_scratch.checkpoint.folders import local_folder
from lm_from_scratch.checkpoint.published import Published, end_tokens
from lm_from_scratch.checkpoint.state import checkpoints
from lm_from_scratch.checkpoint.weights import load_checkpoint
from lm_from_scratch.commands.options import (
    KERNELS_HELP,
    add_fields,
    device_named,
    given,
    lines_of,
    not_empty,
    option,
    positive,
    use_kernels,
)
from lm_from_scratch.commands.speed import MANY, add_layout_options, in_dtype, make_fast, note
from lm_from_scratch.generation.beam_search import beam_search
from lm_from_scratch.generation.engine import Engine, Request, computed_dtype
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.logit_processors import no_repeat_ngram
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.generation.text import until
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.signals import Ended
from lm_from_scratch.text.tokenizer import Tokenizer


def run(args: argparse.Namespace) -> int:
    """Load a model and print what it says, as it says it."""
    refuse_beside(args)
    folder = local_folder(args.model)
    checkpoint = load_checkpoint(folder, "causal_lm")
    model = checkpoint.model.to(device_named(args.device))
    texts = list(lines_of(args.prompts)) if args.prompts else []
    rows = len(texts) or args.num_beams or args.num_return_sequences
    rows = min(max(rows, 1), MANY)  # checked later
    in_dtype(model, args.dtype, rows)
    if args.kernels:
        use_kernels(model)
    tokenizer = tokenizer_of(folder)
    check_together(tokenizer, model.config, folder)
    speaker = Speaker(model, tokenizer, checkpoint.published, args)
    layout = make_fast(model, args, rows)
    if args.chat:
        chat(speaker, args)
    elif args.prompts:
        answer_all(speaker, texts, args)
    else:
        answer(speaker, args)
    note(layout)
    return 0


def refuse_beside(args: argparse.Namespace) -> None:
    """Refuse options that mean nothing together."""
    if args.num_beams and args.stop:
        raise ValueError(f"--stop {args.stop[0]!r} is not for --num-beams, which ranks whole texts")
    for name, reads in (("--chat", args.chat), ("--prompts -", args.prompts == "-")):
        if reads and sys.stdin is None:
            raise ValueError(f"{name}: the input is closed")
    if args.system and not args.chat:
        raise ValueError(f"--system {args.system!r} is for --chat")
    for name, off in (("prompt", ""), ("num_beams", 0), ("num_return_sequences", 1)):
        for other in ("chat", "prompts"):
            if getattr(args, other) and getattr(args, name) != off:
                raise ValueError(f"{option(name)} {getattr(args, name)} is not for {option(other)}")
    if args.chat and args.prompts:
        raise ValueError(f"--prompts {args.prompts} is not for --chat")


def beginning(text: str, tokenizer: Tokenizer, start: str) -> list[int]:
    """The token ids that a model goes on from: ``start`` says what stands in front of the text."""
    ids = tokenizer.start(text) if start == "rule" else tokenizer.encode(text)
    if start == "end":
        if tokenizer.eos_token_id is None:
            raise ValueError("--start end: the tokenizer has no end token")
        ids = [tokenizer.eos_token_id, *ids]
    if not ids:
        raise ValueError("there is nothing to go on from: give a --prompt, or --start end")
    return ids


class Speaker:
    """A model and how it speaks: all that does not change from prompt to prompt."""

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        published: Published,
        args: argparse.Namespace,
    ) -> None:
        self.model, self.tokenizer, self.stop = model, tokenizer, args.stop
        self.ends = [] if args.ignore_eos else end_tokens(model, tokenizer, published)
        self.sampler = Sampler(**{**DEFAULTS, **given(args, Sampler)})
        self.rules = [no_repeat_ngram(args.no_repeat_ngram)] if args.no_repeat_ngram else []

    def steps(
        self, prompt: list[int], max_new_tokens: int, seed: int, times: int = 1
    ) -> Iterator[list[int | None]]:
        """The tokens after the prompt, step by step."""
        return generate(
            self.model, [prompt], max_new_tokens, self.sampler, self.ends, times, seed,
            processors=self.rules,
        )  # fmt: skip

    def pieces(self, prompt: list[int], max_new_tokens: int, seed: int) -> Iterator[str]:
        """The text after the prompt, piece by piece, without the token that ends it."""
        tokens = (step[0] for step in self.steps(prompt, max_new_tokens, seed))
        words = (token for token in tokens if token is not None and token not in self.ends)
        return until(self.tokenizer.stream(words), self.stop)

    def request(self, text: str, args: argparse.Namespace) -> Request:
        """A text to go on from, for an engine."""
        prompt = beginning(text, self.tokenizer, args.start)
        room = self.model.config.block_size - len(prompt) + 1
        return Request(
            prompt=prompt, max_new_tokens=args.max_new_tokens or max(1, min(100, room)),
            sampler=self.sampler, stop_tokens=self.ends, processors=self.rules, seed=args.seed,
        )  # fmt: skip

    def text(self, tokens: Sequence[int]) -> str:
        """The text of finished tokens, without those that end it."""
        return self.tokenizer.decode([token for token in tokens if token not in self.ends])


def answer(speaker: Speaker, args: argparse.Namespace) -> None:
    """Print what the model says after the prompt."""
    model, tokenizer = speaker.model, speaker.tokenizer
    prompt = beginning(args.prompt, tokenizer, args.start)
    room = model.config.block_size - len(prompt) + 1  # what it was trained for
    max_new_tokens = args.max_new_tokens or max(1, min(100, room))
    if args.num_beams:
        found = beam_search(
            model, [prompt], max_new_tokens, args.num_beams, args.length_penalty,
            num_return_sequences=args.num_return_sequences, stop_tokens=speaker.ends,
            processors=speaker.rules,
        )[0]  # fmt: skip
        for number, hypothesis in enumerate(found, start=1):
            text = speaker.text(hypothesis.tokens)
            print(f"--- {number}, score {hypothesis.score:.3f}\n{args.prompt}{text}")
        return
    if args.num_return_sequences == 1:
        pieces = speaker.pieces(prompt, max_new_tokens, args.seed)  # checked before a word is said
        print(args.prompt, end="", flush=True)
        say(pieces)
        return
    steps = speaker.steps(prompt, max_new_tokens, args.seed, args.num_return_sequences)
    for number, row in enumerate(complete(steps), start=1):
        text = "".join(until([speaker.text(row)], args.stop))
        print(f"--- {number}\n{args.prompt}{text}")


def answer_all(speaker: Speaker, texts: list[str], args: argparse.Namespace) -> None:
    """Print what the model says after each of the texts, in their order. An engine writes up to
    ``MANY`` of them together; each says what it would say alone."""
    if not texts:
        raise ValueError(f"{args.prompts} has no line")
    requests = [speaker.request(text, args) for text in texts]
    engine = engine_for(speaker.model, requests)
    for line, request in enumerate(requests, start=1):
        try:
            engine.submit(request)
        except ValueError as error:
            raise ValueError(f"{args.prompts}, line {line}: {error}") from None
    printed = 0
    for _ in engine.run():
        while printed in engine.results or printed in engine.errors:
            if printed in engine.errors:
                raise engine.errors[printed]
            said = "".join(until([speaker.text(engine.results[printed])], args.stop))
            print(f"--- {printed + 1}\n{texts[printed]}{said}", flush=True)
            printed += 1


def engine_for(model: CausalLM, requests: Sequence[Request]) -> Engine:
    """An engine with a pool for as many requests as it runs at a time, the longest ones."""
    config, size = model.config, 16
    lengths = sorted(len(one.prompt) + one.max_new_tokens for one in requests)[-MANY:]
    heads, D, Dv = config.kv_shape
    blocks = sum(-(-length // size) for length in lengths)
    dtype, device = computed_dtype(model), model.head.weight.device
    pool = BlockPool(config.n_layer, heads, D, blocks, size, dtype, device, Dv)
    return Engine(model, pool, max_batch=len(lengths))


def say(pieces: Iterable[str], said: list[str] | None = None) -> None:
    """Print text as it comes, and end the line even if Ctrl-C ends the text. ``said`` collects
    it."""
    try:
        for text in pieces:
            print(text, end="", flush=True)
            if said is not None:
                said.append(text)
    finally:
        print(flush=True)


def chat(speaker: Speaker, args: argparse.Namespace) -> None:
    """Turns by the template of the tokenizer: a line from the terminal, then an answer. Ctrl-C ends
    an answer, which counts as far as it was said; Ctrl-D or Ctrl-C at the prompt ends the chat."""
    config, messages = speaker.model.config, []
    if args.system:
        messages.append({"role": "system", "content": args.system})
    # what the template refuses is said before the first turn
    speaker.tokenizer.chat([*messages, {"role": "user", "content": "Hello"}])
    sign = "> " if sys.stdin.isatty() else ""
    for turn in itertools.count():
        try:
            line = input(sign)
        except EOFError:
            if sign:
                print()
            return
        messages.append({"role": "user", "content": line})
        prompt = speaker.tokenizer.chat(messages)
        room = config.block_size - len(prompt) + 1
        if room < 1:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens, and the model reads "
                f"{config.block_size}: begin a new one"
            )
        said: list[str] = []
        pieces = speaker.pieces(prompt, min(args.max_new_tokens or 1000, room), args.seed + turn)
        try:
            say(pieces, said)
        except KeyboardInterrupt as end:
            if isinstance(end, Ended) and end.args != (signal.SIGINT,):
                raise
        messages.append({"role": "assistant", "content": "".join(said)})


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a model."""
    place = tokenizer_folder(folder)
    if not (place / "tokenizer.json").is_file():
        raise ValueError(
            f"{place} has no tokenizer.json: save_pretrained(model, folder, tokenizer) writes one"
        )
    return Tokenizer.load(place)


def tokenizer_folder(folder: Path) -> Path:
    """The folder of a model's tokenizer, which a run keeps beside its checkpoints."""
    run = folder.resolve().parent
    beside = folder.resolve() in checkpoints(run) and not (folder / "tokenizer.json").is_file()
    return run if beside else folder


def check_together(tokenizer: Tokenizer, config: Config, folder: Path) -> None:
    """Raises ``ValueError`` for a tokenizer that gives a text tokens without a row in the model. A
    special token that no text begins or ends with, as for padding, may lie above the rows."""
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {token for token, name in added.items() if name.special}
    given = {*tokenizer.backend.get_vocab().values()} - special
    given |= {*tokenizer.start(""), tokenizer.eos_token_id or 0}
    if max(given) >= config.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {max(given) + 1} tokens, the model "
            f"{config.vocab_size}: they do not belong together"
        )


EXAMPLES = """examples
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
"""
#: What is not as the dataclass has it: that draws from the model's own distribution.
DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}


def add_options(p: argparse.ArgumentParser) -> None:
    """A model, a prompt, and how the next tokens are chosen."""
    p.description = (
        "Let a model continue a text, or talk to one. A text begins as the tokenizer's own rule\n"
        "says, and ends at the end tokens that the model's folder names; --start and --ignore-eos\n"
        "change that."
    )
    p.epilog = EXAMPLES
    p.add_argument(
        "--model",
        type=not_empty,
        default="gpt2-docs",
        help="gpt2-docs, qwen2-docs, tasks or worlds, which come with the package (default: "
        "gpt2-docs), or a folder, or a name on the hub",
    )
    p.add_argument("--prompt", default="", help="text to continue; default: a new document")
    p.add_argument(
        "--prompts",
        type=not_empty,
        metavar="FILE",
        help="many texts to continue, one a line, together; - reads them from the input",
    )
    p.add_argument(
        "--start",
        choices=["rule", "end", "nothing"],
        default="rule",
        help="what stands in front of the prompt: what the tokenizer's rule says, the end token, "
        "as between documents, or nothing; default: rule",
    )
    p.add_argument(
        "--ignore-eos", action="store_true", help="go on after an end token, to --max-new-tokens"
    )
    p.add_argument(
        "--chat",
        action="store_true",
        help="turns from the terminal, by the tokenizer's chat template; Ctrl-C ends an answer, "
        "Ctrl-D the chat",
    )
    p.add_argument("--system", default="", metavar="TEXT", help="of a chat: what it is told first")
    p.add_argument(
        "--max-new-tokens",
        type=positive,
        help="default: 100, in a chat 1000, or what fits the model",
    )
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
    add_layout_options(p)
    p.add_argument("--kernels", action="store_true", help=KERNELS_HELP)
