"""Text to train on, and a part of it held out.

The corpora are already on the reader's disk: the standard library of Python carries its language
reference, thousands of docstrings, and its source. Any text file or folder works the same way.

Documents are split into train and held-out by their name, so that the split is the same on every
machine; then every paragraph of 40 characters or more of a held-out document that also stands in
the training text is removed, so that the held-out loss does not measure what was learned by heart.

The shipped models were trained on this text and this split: with another, the losses in their
``record.json`` are no longer comparable.
"""

import ast
import gc
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random

from lm_from_scratch.files import read_text
from lm_from_scratch.text.document import Document, place
from lm_from_scratch.text.plots import stories
from lm_from_scratch.text.tasks import DOCUMENTS, TASKS, prompt, questions

#: Top-level modules that are left out: tests and demos, tables, what some systems do not install,
#: and the module that holds the language reference itself.
NOT_READ = {
    "__phello__", "config", "distutils", "encodings", "ensurepip", "idlelib", "lib2to3",
    "pydoc_data", "site-packages", "dist-packages", "test", "tests", "turtledemo",
}  # fmt: skip


def reference() -> list[Document]:
    """The topics of Python's language reference, as ``help()`` shows them: English prose."""
    from pydoc_data.topics import topics

    return [
        Document(name=f"reference/{name}", group=f"reference/{name}", text=text.strip())
        for name, text in sorted(topics.items())
    ]


def _modules() -> Iterator[tuple[str, str]]:
    """Name and source of every module of the standard library; nothing is imported."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(_files(library)):
        parts = path.relative_to(library).with_suffix("").parts
        if path.stem in NOT_READ or parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        yield ".".join(parts).removesuffix(".__init__"), source


def _files(folder: Path) -> Iterator[Path]:
    """The Python files below a folder, but for those in folders that are not read."""
    for path in folder.iterdir():
        if path.suffix == ".py":
            yield path
        elif path.name not in NOT_READ and path.is_dir() and not path.is_symlink():
            yield from _files(path)


def docstrings() -> list[Document]:
    """Every docstring of the standard library, below the signature that it describes."""
    return list(_docstrings())


@cache  # to parse the library takes seconds
def _docstrings() -> tuple[Document, ...]:
    documents: list[Document] = []

    def visit(node: ast.AST, name: str, module: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node)
            if text:
                signature = ""
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    signature = f"({ast.unparse(node.args)})"
                text = f"{name}{signature}\n\n{text.strip()}"
                documents.append(Document(f"docstrings/{name}", f"module/{module}", text))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                visit(child, f"{name}.{child.name}" if hasattr(child, "name") else name, module)

    collects = gc.isenabled()
    gc.disable()  # trees have no cycles, and a collection would walk through all that is alive
    try:
        for module, source in _modules():
            visit(ast.parse(source), module, module)
    finally:
        if collects:
            gc.enable()
    return tuple(documents)


def source() -> list[Document]:
    """The source of every module of the standard library."""
    return [
        Document(f"source/{name}", f"module/{name}", text)
        for name, text in _modules()
        if text.strip()
    ]


def tasks() -> list[Document]:
    """Questions with their answers, one a document: what :mod:`~lm_from_scratch.text.tasks` draws.
    The question decides the side of the split."""
    documents = []
    for name, count in DOCUMENTS.items():
        for question in islice(questions(name, Random(f"documents of {name}")), count):
            asked = prompt(name, question)
            text = asked + TASKS[name].answer(question)
            documents.append(Document(f"{name}/{question}", asked, text))
    return documents


CORPORA: dict[str, Callable[[], list[Document]]] = {
    "reference": reference,
    "docstrings": docstrings,
    "source": source,
    "tasks": tasks,
    "worlds": stories,
}


#: What the names of text files end with, in letters of either case.
TEXT_SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst", ".org", ".adoc", ".tex", ".py")


def read_texts(path: str | Path, chunk: int | None = None) -> list[Document]:
    """The reader's own text: each text file of a folder is a document.

    A single file, or one that holds more than a tenth of a folder's text, is cut into documents of
    about ``chunk`` characters: 4000, or less if the text would not give about twenty. Held out
    whole, it could be most of the text. It is cut between paragraphs; where these are too long,
    between lines, then between words. Raises ``ValueError`` where there is no text.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in TEXT_SUFFIXES)
        texts = {_name(p.relative_to(path)): read_text(p) for p in files if p.is_file()}
        texts = {name: text for name, text in texts.items() if text.strip()}
        if not texts:
            raise ValueError(f"no text in the folder {path}: it needs files {TEXT_SUFFIXES}")
    elif path.exists():
        texts = {_name(Path(path.name)): read_text(path)}
        if not any(text.strip() for text in texts.values()):
            raise ValueError(f"{path} holds no text")
    else:
        raise ValueError(f"{path} is neither a file nor a folder")
    length = sum(map(len, texts.values()))
    documents = []
    for name, text in texts.items():
        if 10 * len(text) <= length:
            documents.append(Document(name, name, text))
            continue
        chunks = cut(text, chunk or min(4000, 1 + length // 20))
        named = [(f"{name}#{i}", part.strip()) for i, part in enumerate(chunks)]
        documents += [Document(name, name, part) for name, part in named if part]
    return documents


def cut(text: str, size: int, ends: Sequence[str] = ("\n\n", "\n", " ", "")) -> list[str]:
    """The text in pieces that begin after one of the ``ends``, the first that is enough: a piece
    has ``size`` characters or more, by less than one part. Joined they are the text."""
    end, *finer = ends
    parts = text.split(end) if end else list(text)
    parts = [part + end for part in parts[:-1]] + parts[-1:]
    pieces = [""]
    for part in parts:
        if finer and len(part) > 2 * size:  # a paragraph that would be a document of its own
            pieces += [*cut(part, size, finer), ""]
            continue
        if len(pieces[-1]) >= size:
            pieces.append("")
        pieces[-1] += part
    return [piece for piece in pieces if piece]


def _name(path: Path) -> str:
    """Readable where the bytes of a file name are no UTF-8, as on old disks."""
    return os.fsencode(path).decode(errors="replace")


def load_split(names: Sequence[str], held_out: float) -> tuple[list[Document], list[Document]]:
    """Train and held-out documents of several corpora together."""
    return split([document for name in names for document in load_corpus(name)], held_out)


def load_corpus(name: str) -> list[Document]:
    """A corpus by its name, or the text at a path. ``name*3`` repeats it three times.

    Raises ``ValueError`` if it is neither a corpus nor a path with text.
    """
    name, star, times = name.partition("*")
    if star and not re.fullmatch("0*[1-9][0-9]{0,3}", times):
        raise ValueError(
            f"corpus {name}*{times[:40]}: after * a whole number is needed, 1 ... 9999"
        )
    documents = CORPORA[name]() if name in CORPORA else read_texts(name)
    return documents * (int(times) if star else 1)


def split(
    documents: Sequence[Document], held_out: float = 0.05
) -> tuple[list[Document], list[Document]]:
    """Train and held-out documents. ``held_out`` is the share of the groups that is held out.

    A group's side depends on its name alone; at least one group goes to each side. A held-out
    paragraph of 40 characters or more that also stands in the training text is removed; a document
    that loses more than half is dropped. Raises ``ValueError`` where one side would be empty.
    """
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"held_out={held_out} must be above 0 and below 1")
    places = {document.group: place(document.group) for document in documents}
    if len(places) < 2:
        raise ValueError(
            f"{len(documents)} documents of {len(places)} group {list(places)} cannot be split "
            "into a training and a held-out side: at least two are needed"
        )
    border = max(held_out, min(places.values()))  # the first group in any case,
    border = min(border, sorted(places.values())[-2])  # and never the last

    def is_held_out(group: str) -> bool:
        return places[group] <= border

    train = [d for d in documents if not is_held_out(d.group)]
    seen = {paragraph for d in train for paragraph in _paragraphs(d.text)}
    tests = {}
    for document in documents:
        if is_held_out(document.group):
            text = "\n\n".join(
                part
                for part in document.text.split("\n\n")
                if len(part.strip()) < 40 or part.strip() not in seen
            )
            if 2 * len(text) >= len(document.text):
                tests[document.name, document.text] = replace(document, text=text)
    if not train or not tests:
        raise ValueError(
            f"{len(documents)} documents give {len(train)} for training and {len(tests)} held out; "
            "more text is needed, or another held_out share"
        )
    return train, list(tests.values())


def _paragraphs(text: str) -> Iterator[str]:
    return (part.strip() for part in text.split("\n\n") if len(part.strip()) >= 40)
