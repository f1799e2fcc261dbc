"""Every file that a build makes from what stands somewhere else, before Sphinx looks for pages."""

from pathlib import Path
from typing import Any

from api import families, package
from course import exercise_pages, guide, hand_out
from editions import translation
from gallery import exercises, gpu_pages, pages
from live import tour
from museum import stories
from sources import templates

from output import benchmarks


def texts(docs: Path) -> dict[Path, str | bytes]:
    """What is in each file; whole pages first, then what a page includes."""
    found = {
        "benchmarks.rst": benchmarks.page(benchmarks.measure.all_stored(), docs / "generated"),
        **stories.pages(),
        "families.rst": families.page(),
        "exercises/index.md": templates.render("exercises.md", exercises=exercises),
        "exercises/proof.md": exercise_pages.proof(),
        "exercises/your_package.md": exercise_pages.your_package(),
        "gpu/index.rst": gpu_pages.index(),
        **package.texts(),
        **guide.texts(),
        "tour.rst": templates.render("tour.rst", **tour.numbers()),
        "javascript.rst": templates.render("javascript.rst", lines=javascript_lines()),
        "generated/rooms.rst": package.rooms(),
        "generated/config_names.rst": package.config_names(),
    }
    for path in (pages.DOCS / "_pages" / "course").iterdir():
        found[f"generated/{path.name}"] = templates.render(
            f"course/{path.name}", pages=pages, exercises=exercises
        )
    for one in exercises.written():
        found[f"exercises/{one.name}.md"] = exercise_pages.page(one)
    for notebook in pages.notebooks():
        found[f"gpu/{notebook.name}"] = gpu_pages.page(notebook)
    return {docs / name: text for name, text in found.items()}


def javascript_lines() -> int:
    """Lines of the model in JavaScript: of its files beside the loader and the widgets."""
    engine = (pages.DOCS / "_static" / "live").glob("*.js")
    files = [path for path in engine if path.stem not in ("loader", "widget")]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def write(app: Any) -> None:
    docs = Path(app.srcdir)
    if translation.LANGUAGE != translation.FIRST:  # all other files are there
        templates.write({docs / "tour.rst": templates.render("tour.rst", **tour.numbers())})
        return
    given = hand_out.student_files()
    files = docs / "exercises" / "files"
    made = texts(docs) | {files / path: text for path, text in given.items()}
    made[files / "exercises.zip"] = hand_out.archive(given)
    templates.write(made)
    others = [f"{pages.document(name)[1:]}.rst" for name in pages.in_order()]
    others += [f"api/{name}.rst" for name in package.listed()]
    kept = {*made, *(docs / name for name in others)}
    for pattern in (
        *("api/*.*", "classroom/weeks_*/*.*", "exercises/**/*.*", "gpu/*.*", "stories/*.*"),
        "auto_tutorials/[0-9]*/[0-9]*.rst",
    ):
        for old in {*docs.glob(pattern)} - kept:
            old.unlink()  # the page of what was renamed or removed goes with it


def sweep(app: Any, error: Exception | None) -> None:
    """The HTML of a page that was renamed or removed goes with it, too."""
    if not error and app.builder.format == "html":
        for folder in ("api", "auto_tutorials", "classroom", "exercises", "gpu", "stories"):
            for path in Path(app.outdir, folder).rglob("*.html"):
                name = path.relative_to(app.outdir).with_suffix("").as_posix()
                if name not in app.env.found_docs:
                    path.unlink()


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", write, priority=100)  # before autosummary writes its pages
    app.connect("build-finished", sweep)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
