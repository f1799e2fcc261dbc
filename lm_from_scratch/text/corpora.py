"""Text to train on, and a part of it held out.

The corpora are already on the reader's disk: the standard library of Python carries its language
reference, thousands of docstrings, and its source. Any text file or folder works the same way.

Documents are split into train and held-out by their name, so that the split is the same on every
machine; then every paragraph of 40 characters or more of a held-out document that also stands in
the training text is removed, so that the held-out loss does not measure what was learnt by heart.

The shipped models were trained on this text and this split: with another, the losses in their
``record.json`` are no longer comparable.
"""

import ast
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lm_from_scratch.text.document import Document

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


def _modules() -> Iterator[tuple[str, str, ast.Module]]:
    """Name, source and syntax tree of every module of the standard library; nothing is imported."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if NOT_READ.intersection(parts) or parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue  # a file that is broken on purpose, or not UTF-8
        yield ".".join(parts).removesuffix(".__init__"), source, tree


def docstrings() -> list[Document]:
    """Every docstring of the standard library, below the signature that it describes."""
    documents: list[Document] = []

    def visit(node: ast.AST, name: str, module: str) -> None:
        signature = ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            signature = f"({ast.unparse(node.args)})"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node)
            if text:
                text = f"{name}{signature}\n\n{text.strip()}"
                documents.append(Document(f"docstrings/{name}", f"module/{module}", text))
        for child in ast.iter_child_nodes(node):
            visit(child, f"{name}.{child.name}" if hasattr(child, "name") else name, module)

    for module, _, tree in _modules():
        visit(tree, module, module)
    return documents


def source() -> list[Document]:
    """The source of every module of the standard library."""
    return [
        Document(f"source/{name}", f"module/{name}", text)
        for name, text, _ in _modules()
        if text.strip()
    ]


CORPORA: dict[str, Callable[[], list[Document]]] = {
    "reference": reference,
    "docstrings": docstrings,
    "source": source,
}


def read_texts(path: str | Path, chunk: int | None = None) -> list[Document]:
    """The reader's own text: each text file of a folder is a document.

    A single file is cut between paragraphs into documents of about ``chunk`` characters: 4000, or
    less if the file would not give about twenty.
    """
    path = Path(path)
    if path.is_dir():
        suffixes = {".txt", ".md", ".rst", ".py"}
        files = sorted(p for p in path.rglob("*") if p.suffix in suffixes and p.is_file())
        texts = [(_name(p.relative_to(path)), _read(p)) for p in files]
        documents = [Document(name, name, text) for name, text in texts if text.strip()]
        if not documents:
            raise ValueError(f"no text in the folder {path}: it needs {sorted(suffixes)} files")
        return documents
    if not path.is_file():
        raise ValueError(f"{path} is neither a file nor a folder")
    text = _read(path)
    chunk = chunk or min(4000, 1 + len(text) // 20)
    chunks = [""]
    for paragraph in text.split("\n\n"):
        if len(chunks[-1]) >= chunk:
            chunks.append("")
        chunks[-1] += paragraph + "\n\n"
    names = [f"{_name(Path(path.name))}#{i}" for i in range(len(chunks))]
    found = [Document(n, n, t.strip()) for n, t in zip(names, chunks, strict=True) if t.strip()]
    if not found:
        raise ValueError(f"{path} holds no text")
    return found


def _name(path: Path) -> str:
    """Readable where the bytes of a file name are no UTF-8, as on old disks."""
    return os.fsencode(path).decode(errors="replace")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def load_split(names: Sequence[str], held_out: float) -> tuple[list[Document], list[Document]]:
    """Train and held-out documents of several corpora together."""
    return split([document for name in names for document in load_corpus(name)], held_out)


def load_corpus(name: str) -> list[Document]:
    """A corpus by its name, or the text at a path. ``name*3`` repeats it three times.

    Raises ``ValueError`` if it is neither a corpus nor a path with text.
    """
    name, star, times = name.partition("*")
    if star and not (times.isascii() and times.isdigit()):
        raise ValueError(f"corpus {name + star + times!r}: after * a whole number is needed")
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
    places = {document.group: _place(document.group) for document in documents}
    if len(places) < 2:
        raise ValueError(
            f"{len(documents)} documents of {len(places)} group cannot be split into a training "
            "and a held-out side: at least two are needed"
        )
    border = max(held_out, min(places.values()))  # the first group in any case,
    border = min(border, sorted(places.values())[-2])  # and never the last

    def is_held_out(group: str) -> bool:
        return places[group] <= border

    train = [d for d in documents if not is_held_out(d.group)]
    seen = {paragraph for d in train for paragraph in _paragraphs(d.text)}
    kept = {}
    for document in documents:
        if is_held_out(document.group):
            text = "\n\n".join(
                part
                for part in document.text.split("\n\n")
                if len(part.strip()) < 40 or part.strip() not in seen
            )
            if 2 * len(text) >= len(document.text):
                kept[document.name, document.text] = replace(document, text=text)
    if not train or not kept:
        raise ValueError(
            f"{len(documents)} documents give {len(train)} for training and {len(kept)} held out; "
            "more text is needed, or another held_out share"
        )
    return train, list(kept.values())


def _place(group: str) -> float:
    """A number in [0, 1) that depends on the name alone, spread evenly over all names."""
    digest = hashlib.sha256(group.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _paragraphs(text: str) -> Iterator[str]:
    return (part.strip() for part in text.split("\n\n") if len(part.strip()) >= 40)
