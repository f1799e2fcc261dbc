"""``generate``: a model continues a text."""

import itertools
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lm_from_scratch.cache.paged import BlockPool
from lm_from_scratch.checkpoint.folders import local_folder
from lm_from_scratch.checkpoint.published import GENERATION, Published, end_tokens
from lm_from_scratch.commands.loading import (
    about,
    check_together,
    device_named,
    lines_of,
    tokenizer_of,
    use_kernels,
)
from lm_from_scratch.commands.options import GenerateOptions
from lm_from_scratch.commands.speed import MANY, in_dtype, make_fast, note
from lm_from_scratch.generation.beam_search import beam_search
from lm_from_scratch.generation.engine import Engine, computed_dtype
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.logit_processors import no_repeat_ngram
from lm_from_scratch.generation.requests import Request
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.generation.speculative import ModelDrafter, speculate
from lm_from_scratch.generation.text import until
from lm_from_scratch.interop.peft import load_with_adapter
from lm_from_scratch.layers.recurrent import RecurrentLayer
from lm_from_scratch.limits import Whole, require
from lm_from_scratch.models.blocks import has
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.signals import Ended
from lm_from_scratch.text.tokenizer import Tokenizer

#: How a token is chosen where nobody says it; and in ``transformers``, by a folder that says that
#: tokens are drawn.
OURS, DRAWN = Sampler(temperature=0.8, top_p=0.95), Sampler(top_k=50)


def run(options: GenerateOptions) -> int:
    """Load a model and print what it says, as it says it."""
    for flag, reads in (("--chat", options.chat), ("--prompts -", options.prompts == "-")):
        if reads and sys.stdin is None:
            raise ValueError(f"{flag}: the input is closed")
    folder = local_folder(options.model)
    checkpoint = load_with_adapter(folder, "causal_lm")
    model = checkpoint.model.to(device_named(options.device))
    texts = list(lines_of(options.prompts)) if options.prompts else []
    rows = len(texts) or options.num_beams or options.num_return_sequences
    rows = min(max(rows, 1), MANY)  # checked later
    in_dtype(model, options.dtype, rows)
    if options.kernels:
        use_kernels(model)
    tokenizer = tokenizer_of(folder)
    check_together(tokenizer, model.config, folder)
    speaker = Speaker(model, tokenizer, checkpoint.published, options, folder)
    if options.draft:
        speaker.drafter = drafter_of(options.draft, tokenizer, model, options.dtype)
    layout = make_fast(model, options, rows)
    if options.chat:
        chat(speaker, options)
    elif options.prompts:
        answer_all(speaker, texts, options)
    else:
        answer(speaker, options)
    note(layout)
    return 0


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


def stored_choice(generation: Mapping[str, Any]) -> tuple[Sampler, int]:
    """How a ``generation_config.json`` wants tokens to be chosen: a sampler, and the length of what
    must not stand twice. What it leaves out is as in ``transformers`` if it asks to draw, else
    :data:`OURS`. Raises ``ValueError`` for what means nothing."""
    names = (*vars(OURS), "do_sample", "no_repeat_ngram_size")
    stored = {name: generation[name] for name in names if generation.get(name) is not None}
    if "do_sample" in stored:
        require(bool, do_sample=stored["do_sample"])
    draws, ngram = stored.pop("do_sample", None), stored.pop("no_repeat_ngram_size", 0)
    require(Whole, no_repeat_ngram_size=ngram)
    sampler = replace(DRAWN if draws else OURS, **stored)
    return replace(sampler, temperature=0.0) if draws is False else sampler, ngram


def drafter_of(name: str, tokenizer: Tokenizer, model: CausalLM, dtype: str) -> ModelDrafter:
    """The model that drafts for another, where that one is."""
    folder = local_folder(name)
    if tokenizer_of(folder).backend.get_vocab() != tokenizer.backend.get_vocab():
        raise ValueError(f"--draft {name} has other tokens than the model: they must be the same")
    drafter = load_with_adapter(folder, "causal_lm").model.to(model.head.weight.device)
    in_dtype(drafter, dtype, 1)
    return ModelDrafter(drafter)


class Speaker:
    """A model and how it speaks: all that does not change from prompt to prompt."""

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        published: Published,
        options: GenerateOptions,
        folder: Path,
    ) -> None:
        self.model, self.tokenizer, self.stop = model, tokenizer, options.stop
        self.ends = [] if options.ignore_eos else end_tokens(model, tokenizer, published)
        self.drafter: ModelDrafter | None = None
        with about(str(folder / GENERATION)):
            sampler, ngram = stored_choice(published.generation_config)
        given = {name: vars(options)[name] for name in vars(sampler)}
        self.sampler = replace(sampler, **{k: v for k, v in given.items() if v is not None})
        ngram = ngram if options.no_repeat_ngram is None else options.no_repeat_ngram
        self.rules = [no_repeat_ngram(ngram)] if ngram else []

    def steps(
        self, prompt: list[int], max_new_tokens: int, seed: int, times: int = 1
    ) -> Iterator[list[int | None]]:
        """The tokens after the prompt, step by step."""
        if self.drafter:
            passes = speculate(
                self.model, self.drafter, [prompt], max_new_tokens, self.sampler,
                stop_tokens=self.ends, seed=seed, processors=self.rules,
            )  # fmt: skip
            return ([token] for one in passes for token in one.tokens[0])
        return generate(
            self.model, [prompt], max_new_tokens, self.sampler, self.ends, times, seed,
            processors=self.rules,
        )  # fmt: skip

    def pieces(self, prompt: list[int], max_new_tokens: int, seed: int) -> Iterator[str]:
        """The text after the prompt, piece by piece, without the token that ends it."""
        tokens = (step[0] for step in self.steps(prompt, max_new_tokens, seed))
        words = (token for token in tokens if token is not None and token not in self.ends)
        return until(self.tokenizer.stream(words, after=prompt), self.stop)

    def request(self, text: str, options: GenerateOptions) -> Request:
        """A text to go on from, for an engine."""
        prompt = beginning(text, self.tokenizer, options.start)
        room = self.model.config.block_size - len(prompt) + 1
        return Request(
            prompt=prompt, max_new_tokens=options.max_new_tokens or max(1, min(100, room)),
            sampler=self.sampler, stop_tokens=self.ends, processors=self.rules, seed=options.seed,
        )  # fmt: skip

    def text(self, tokens: Sequence[int], prompt: Sequence[int]) -> str:
        """The text of finished tokens after a prompt, without those that end it, up to the first of
        the stop strings."""
        words = [token for token in tokens if token not in self.ends]
        return "".join(until([self.tokenizer.decode(words, after=prompt)], self.stop))


def answer(speaker: Speaker, options: GenerateOptions) -> None:
    """Print what the model says after the prompt."""
    model, tokenizer = speaker.model, speaker.tokenizer
    prompt = beginning(options.prompt, tokenizer, options.start)
    room = model.config.block_size - len(prompt) + 1  # what it was trained for
    max_new_tokens = options.max_new_tokens or max(1, min(100, room))
    if options.num_beams:
        hypotheses = beam_search(
            model, [prompt], max_new_tokens, options.num_beams, options.length_penalty,
            num_return_sequences=options.num_return_sequences, stop_tokens=speaker.ends,
            processors=speaker.rules,
        )[0]  # fmt: skip
        for number, hypothesis in enumerate(hypotheses, start=1):
            text = speaker.text(hypothesis.tokens, prompt)
            print(f"--- {number}, score {hypothesis.score:.3f}\n{options.prompt}{text}")
        return
    if options.num_return_sequences == 1:
        pieces = speaker.pieces(
            prompt, max_new_tokens, options.seed
        )  # checked before a word is said
        print(options.prompt, end="", flush=True)
        say(pieces)
        return
    steps = speaker.steps(prompt, max_new_tokens, options.seed, options.num_return_sequences)
    for number, row in enumerate(complete(progress(max_new_tokens, of=steps)), start=1):
        print(f"--- {number}\n{options.prompt}{speaker.text(row, prompt)}")


def answer_all(speaker: Speaker, texts: list[str], options: GenerateOptions) -> None:
    """Print what the model says after each of the texts, in their order: what it would say alone.
    An engine writes up to ``MANY`` of them together; layers with a state, which it has no room for,
    and layers of unlike widths write one after the other."""
    if not texts:
        raise ValueError(f"{options.prompts} has no line")
    requests = [speaker.request(text, options) for text in texts]
    one_by_one = has(speaker.model, RecurrentLayer) or not alike(speaker.model.config)
    answers = (in_turn if one_by_one else together)(speaker.model, requests, str(options.prompts))
    for number, (text, request, tokens) in enumerate(
        zip(texts, requests, answers, strict=True), start=1
    ):
        rest = speaker.text(tokens, request.prompt)
        with tqdm.external_write_mode():
            print(f"--- {number}\n{text}{rest}", flush=True)


def alike(config: Any) -> bool:
    """Whether all layers keep keys of one shape, as the blocks of a pool have it."""
    try:
        return bool(config.kv_shape)
    except ValueError:
        return False


def together(model: CausalLM, requests: Sequence[Request], file: str) -> Iterator[list[int]]:
    """What the model says to each of the requests, in their order, by an engine."""
    engine = engine_for(model, requests)
    for line, request in enumerate(requests, start=1):
        with about(f"{file}, line {line}"):
            engine.submit(request)
    next_one = 0
    longest = [len(one.prompt) + one.max_new_tokens - 1 for one in requests]  # the last is not read
    with progress(sum(longest)) as bar:
        for step in engine.run():
            bar.update(sum(step.fed.values()) + sum(step.shared.values()))
            while next_one in engine.results or next_one in engine.errors:
                if next_one in engine.errors:
                    raise engine.errors[next_one]
                yield engine.results[next_one]
                next_one += 1


def in_turn(model: CausalLM, requests: Sequence[Request], file: str) -> Iterator[list[int]]:
    """The same, one request after the other."""
    runs = []
    for line, one in enumerate(requests, start=1):
        with about(f"{file}, line {line}"):
            steps = generate(
                model, [one.prompt], one.max_new_tokens, one.sampler, one.stop_tokens,
                seed=one.seed, processors=one.processors,
            )  # fmt: skip
            runs.append(steps)
    with progress(len(runs), "text") as bar:
        for steps in runs:
            yield complete(steps)[0]
            bar.update()


def progress(total: int, unit: str = "token", of: Iterable[Any] | None = None) -> Any:
    """A bar on a terminal, for what prints nothing in a second; it goes away at the end."""
    disable = True if sys.stderr is None else None  # None: where there is no terminal
    return tqdm(of, total=total, unit=unit, delay=1, leave=False, disable=disable)


def engine_for(model: CausalLM, requests: Sequence[Request]) -> Engine:
    """An engine with a pool for as many requests as it runs at a time, the longest ones."""
    config, size = model.config, 16
    lengths = sorted(len(one.prompt) + one.max_new_tokens for one in requests)[-MANY:]
    heads, D, Dv = config.kv_shape
    blocks = sum(-(-length // size) for length in lengths)
    dtype, device = computed_dtype(model), model.head.weight.device
    pool = BlockPool(len(config.windows), heads, D, blocks, size, dtype, device, Dv)
    return Engine(model, pool, max_batch=len(lengths))


def say(pieces: Iterable[str], heard: list[str] | None = None) -> None:
    """Print text as it comes, and end the line even if Ctrl-C ends the text. ``said`` collects
    it."""
    try:
        for text in pieces:
            print(text, end="", flush=True)
            if heard is not None:
                heard.append(text)
    finally:
        print(flush=True)


def chat(speaker: Speaker, options: GenerateOptions) -> None:
    """Turns by the template of the tokenizer: a line from the terminal, then an answer. Ctrl-C ends
    an answer, which counts as far as it was said; Ctrl-D or Ctrl-C at the prompt ends the chat."""
    config, messages = speaker.model.config, []
    if options.system:
        messages.append({"role": "system", "content": options.system})
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
        answer: list[str] = []
        pieces = speaker.pieces(
            prompt, min(options.max_new_tokens or 1000, room), options.seed + turn
        )
        try:
            say(pieces, answer)
        except KeyboardInterrupt as end:
            if isinstance(end, Ended) and end.args != (signal.SIGINT,):
                raise
        messages.append({"role": "assistant", "content": "".join(answer)})
