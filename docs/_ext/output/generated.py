"""Every file that a build makes from what stands somewhere else, before Sphinx looks for pages.

The prose is in the templates of `docs/_pages`; the other folders of `_ext` compute what is filled
in.
"""

from pathlib import Path
from typing import Any

from api import families, package
from course import exercise_pages, hand_out, plans, sheets
from gallery import exercises, gpu_pages, pages
from live import tour
from museum import cards, stories
from sources.templates import PAGES, render, table

from lm_from_scratch.exercises.exercise import Exercise
from output import benchmarks

PAGES.tests["lesson"] = pages.is_lesson
#: Folders of the site in which all pages are generated.
FOLDERS = ("api", "auto_tutorials", "classroom", "exercises", "gpu", "stories")


def texts(docs: Path) -> dict[Path, str | bytes]:
    """What is in each file; whole pages first, then what a page includes."""
    reports = benchmarks.measure.all_stored()
    kinds = {"kind": exercise_pages.kind, "mistake": exercise_pages.mistake}
    files: dict[str, str | bytes] = {
        "benchmarks.rst": render(
            "benchmarks.rst", **benchmarks.values(reports, docs / "generated")
        ),
        "museum.rst": render("museum.rst", **cards.index(stories.told())),
        "families.rst": render("families.rst", **families.values()),
        "exercises/index.md": render("exercises.md", exercises=exercises, **kinds),
        "exercises/proof.md": render("checks.md", exercises=exercises.written()),
        "exercises/your_package.md": render("your_package.md", **exercise_pages.your_package()),
        "gpu/index.rst": render("gpu.rst", **gpu_pages.index(), kernels=package.kernels()),
        "api/index.rst": render("api.rst", **package.index()),
        "tour.rst": render("tour.rst", **tour.numbers()),
        "javascript.rst": render("javascript.rst", lines=javascript_lines()),
        "generated/api.rst": render("autosummary.rst", modules=package.listed()),
        "generated/rooms.rst": table(package.rooms(), ":widths: 14 30 34 22"),
        "generated/config_names.rst": table(package.config_names()),
    }
    for name in package.listed():
        files[f"generated/used_on/{name}.rst"] = render("used_on.rst", links=package.used_on(name))
    for name in stories.STORIES:
        files[f"stories/{name}.rst"] = story(name)
    for one in exercises.written():
        files[f"exercises/{one.name}.md"] = exercise(one)
    for notebook in pages.notebooks():
        files[f"gpu/{notebook.name}"] = gpu_pages.page(notebook)
    files |= for_all_pages() | for_teachers()
    return {docs / name: text for name, text in files.items()}


def for_all_pages() -> dict[str, str]:
    """What many pages include: tables of the lessons and of the exercises."""
    names = PAGES.list_templates(filter_func=lambda name: name.startswith("generated/"))
    return {name: render(name, pages=pages, exercises=exercises) for name in names}


def for_teachers() -> dict[str, str]:
    """The plans, a sheet for each of their weeks, and the topics of other courses."""
    files = {"classroom/syllabi.md": render("teaching/syllabi.md", courses=plans.courses())}
    for number in plans.PLANS:
        plan = render("teaching/plan.md", **plans.table(number), sheet=sheets.place)
        files[f"generated/teaching/weeks_{number}.md"] = plan
        for week in range(1, number + 1):
            files[f"{sheets.place(number, week)}.md"] = sheets.sheet(number, week)
    return files


def exercise(one: Exercise) -> str:
    return render("exercise.md", **exercise_pages.values(one))


def story(name: str) -> str:
    return render(f"stories/{name}.rst", fix=cards.fix, **stories.values(name))


def javascript_lines() -> int:
    """Lines of the model in JavaScript: of its files beside the loader and the widgets."""
    engine = (pages.DOCS / "_static" / "live").glob("*.js")
    files = [path for path in engine if path.stem not in ("loader", "widget")]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def write(app: Any) -> None:
    """An unchanged file keeps its time, so the next build does not read it again."""
    docs = Path(app.srcdir)
    if not app.tags.has("first_edition"):  # all other files are there
        files: dict[Path, str | bytes] = {docs / "tour.rst": render("tour.rst", **tour.numbers())}
    else:
        given = hand_out.student_files()
        downloads = docs / "exercises" / "files"
        files = texts(docs) | {downloads / path: text for path, text in given.items()}
        files[downloads / "exercises.zip"] = hand_out.archive(given)
        remove_old(docs, {*files})
    for path, content in files.items():
        content = content.encode() if isinstance(content, str) else content
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)


def remove_old(docs: Path, files: set[Path]) -> None:
    """The page of what was renamed or removed goes with it."""
    current = files | {docs / f"{pages.document(name)[1:]}.rst" for name in pages.in_order()}
    current |= {docs / f"api/{name}.rst" for name in package.listed()}
    for pattern in (
        *("api/*.*", "classroom/weeks_*/*.*", "exercises/**/*.*", "gpu/*.*", "stories/*.*"),
        "auto_tutorials/[0-9]*/[0-9]*.rst",
    ):
        for old in {*docs.glob(pattern)} - current:
            old.unlink()


def sweep(app: Any, error: Exception | None) -> None:
    """The HTML of a page that was renamed or removed goes with it, too."""
    if not error and app.builder.format == "html":
        for path in (
            path for folder in FOLDERS for path in Path(app.outdir, folder).rglob("*.html")
        ):
            if path.relative_to(app.outdir).with_suffix("").as_posix() not in app.env.found_docs:
                path.unlink()


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", write, priority=100)  # before autosummary writes its pages
    app.connect("build-finished", sweep)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
