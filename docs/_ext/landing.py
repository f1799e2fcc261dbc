"""What two pages get on the way to Sphinx: the landing page the address of the repository, the
index of the gallery the chapters outside it."""

from typing import Any

CLONE = "   $ git clone {repository} lm_from_scratch\n"


def add_address(app: Any, docname: str, source: list[str]) -> None:
    """``Repository`` of ``project.urls`` in pyproject.toml; without it the line is left out."""
    if docname == "index":
        address = app.config.repository
        line = CLONE.format(repository=address) if address else ""
        source[0] = source[0].replace(CLONE, line)


def add_chapters(app: Any, docname: str, source: list[str]) -> None:
    """They go behind its own: a section, and a place in the table of contents."""
    if docname == "auto_tutorials/index":
        head, toctree, tail = source[0].rpartition(".. toctree::")
        own = f"{toctree}\n   :hidden:\n\n   /gpu/index\n   /exercises/index\n"
        more = ".. include:: /generated/more_chapters.rst\n\n"
        source[0] = f"{head}{more}{toctree}{tail}\n{own}"


def setup(app: Any) -> dict[str, bool]:
    app.add_config_value("repository", "", "env", str)
    app.connect("source-read", add_address)
    app.connect("source-read", add_chapters)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
