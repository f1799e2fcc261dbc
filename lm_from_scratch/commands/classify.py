"""``classify``: a model says what a text is."""

import sys
from collections.abc import Iterable, Iterator

import torch
from tqdm import tqdm

from lm_from_scratch.checkpoint.folders import local_folder
from lm_from_scratch.checkpoint.published import labels
from lm_from_scratch.commands.loading import (
    check_together,
    device_named,
    lines_of,
    tokenizer_of,
)
from lm_from_scratch.commands.options import ClassifyOptions
from lm_from_scratch.commands.speed import MANY, in_dtype, make_fast, note
from lm_from_scratch.files import escaped
from lm_from_scratch.interop.peft import load_with_adapter
from lm_from_scratch.models.heads import SequenceClassifier
from lm_from_scratch.models.modes import evaluating
from lm_from_scratch.text.tokenizer import Tokenizer


def run(options: ClassifyOptions) -> int:
    """Print a line for each text, as soon as it is known."""
    if bool(options.texts) == bool(options.file):
        raise ValueError("give texts, or --file with a text in each line")
    if not all(text.strip() for text in options.texts):
        raise ValueError(f"a TEXT is empty: {[*options.texts]}")
    if options.file == "-" and sys.stdin is None:
        raise ValueError("--file -: the input is closed")
    folder = local_folder(options.model)
    checkpoint = load_with_adapter(folder, "classifier")
    model, published = checkpoint.model.to(device_named(options.device)), checkpoint.published
    if not isinstance(model, SequenceClassifier):
        raise ValueError(f"{folder} holds a {type(model).__name__}, which labels tokens, not texts")
    in_dtype(model, options.dtype, MANY)  # about as many as a text has tokens
    layout = make_fast(model, options, MANY)
    tokenizer, names = tokenizer_of(folder), labels(model, published)
    check_together(tokenizer, model.backbone.config, folder)
    problem = published.config.get("problem_type")
    without_bar = bool(options.texts) or options.quiet or sys.stdout.isatty() or sys.stderr is None
    texts = tqdm(options.texts or lines_of(str(options.file)), unit="text", disable=without_bar)
    for logits in answers(model, tokenizer, texts):
        print("" if logits is None else line_of(logits, names, problem), flush=True)
    note(layout)
    return 0


def answers(
    model: SequenceClassifier, tokenizer: Tokenizer, texts: Iterable[str]
) -> Iterator[torch.Tensor | None]:
    """The logits (n,) of each text, of which the model reads what fits; None for a blank one."""
    device = model.score.weight.device
    for text in texts:
        if not text.strip():
            yield None
            continue
        ids = tokenizer.enclosed(text, model.backbone.config.block_size)
        if not ids:
            raise ValueError(f"the text {text!r} has no token")
        with evaluating(model):
            logits = model(torch.tensor([ids], device=device))[0]
        yield logits.float()


def line_of(logits: torch.Tensor, names: list[str], problem: str | None) -> str:
    """What logits (n,) say. One label of several and its probability; each of several labels and
    its own; or, of a regression, the numbers."""
    names = [escaped(name) for name in names]
    if problem == "regression" or len(names) == 1:
        return "\t".join(f"{value:.4f}" for value in logits.tolist())
    if problem == "multi_label_classification":
        shares = logits.sigmoid().tolist()
        return "\t".join(f"{name}\t{p:.4f}" for name, p in zip(names, shares, strict=True))
    share, best = logits.softmax(0).max(0)
    return f"{names[int(best)]}\t{share:.4f}"
