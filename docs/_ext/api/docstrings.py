"""Docstrings on the API pages: columns become lists, and a short name finds its object."""

import re
import sys
from typing import Annotated, Any, get_args, get_origin

from docutils import nodes
from sphinx.util import typing
from sphinx.util.nodes import make_refnode


def list_of_names(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Show the columns of a docstring, a name and what it is, as a list."""
    inside, above = False, ""
    for number, line in enumerate(lines):
        column = re.match(r"([`\w][`\w, ]*?) {2,}(\S.*)$", line)
        goes_on = inside and line.startswith("   ")
        inside = goes_on or bool(column and (inside or not above))
        if goes_on:
            lines[number] = f"  {line.strip()}"
        elif inside and column:
            lines[number] = f"* ``{column[1].strip('`')}``: {column[2]}"
        above = line


def short_name(app: Any, env: Any, node: Any, contnode: Any) -> nodes.reference | None:
    """Let a docstring say `GPT2Config` from any file, as long as one object has that name."""
    if node.get("refdomain") != "py":
        return None
    domain = env.domains.python_domain
    objects = domain.find_obj(env, None, None, node["reftarget"], node["reftype"], searchmode=1)
    if len(objects) != 1:
        return None
    name, entry = objects[0]
    target = (app.builder, node["refdoc"], entry.docname, entry.node_id)
    return make_refnode(*target, contnode, name)


def without_limits(stringify: Any) -> Any:
    """The function that writes a type, for types as `Annotated[int, ...]`: what it is, an int."""

    def stringified(annotation: Any, *given: Any, **more: Any) -> str:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        return stringify(annotation, *given, **more)

    return stringified


def setup(app: Any) -> dict[str, bool]:
    app.setup_extension("sphinx.ext.autodoc")
    plain = typing.stringify_annotation
    for module in [m for name, m in sys.modules.items() if name.startswith("sphinx.")]:
        if vars(module).get("stringify_annotation") is plain:
            module.stringify_annotation = without_limits(plain)
    app.connect("autodoc-process-docstring", list_of_names)
    app.connect("missing-reference", short_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
