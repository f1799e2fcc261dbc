"""The built site, a server for it on this machine, and a browser that can reach nothing else."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import page_checks
import pytest
from editions import translation
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    Response,
    expect,
    sync_playwright,
)

SITE = Path(__file__).resolve().parents[2] / "docs" / "_build" / "html"
# No telemetry, no update checks: the browser asks for nothing that a page does not ask for.
QUIET = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-features=SpareRendererForSitePerProcess",  # a process for a tab that never comes
    "--disable-gpu",  # there is none, and to imitate one takes a sixth of the time
    # Every other name leads nowhere. A page that asks for one is recorded and fails.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
TIMEOUT = 60_000  # on a busy machine too
expect.set_options(timeout=TIMEOUT)  # which would be 5 s, whatever the context says


def site_of(edition: str) -> Path:
    return SITE if edition == translation.FIRST else SITE / edition


@pytest.fixture(scope="session")
def site() -> Path:
    if not (SITE / "index.html").is_file():
        pytest.fail("There is no built site. Run: make docs")
    return SITE


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, page_checks.Page]:
    return page_checks.read(site)


@pytest.fixture(scope="session")
def server(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path != "/favicon.ico":  # a text has none, and pages name theirs
                return super().do_GET()
            self.send_response(204)
            self.end_headers()

    handler = functools.partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def find_browser() -> str | None:
    names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        message = "No Chromium was found. Install it, or set CHROMIUM to a browser's path."
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        arguments = [*QUIET, "--no-sandbox"] if os.geteuid() == 0 else QUIET
        chromium = playwright.chromium.launch(executable_path=path, args=arguments)
        yield chromium
        chromium.close()


@dataclass
class Visit:
    """A page in the browser, and everything it did wrong."""

    page: Page
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", self._request)
        self.page.on("console", self._console)
        self.page.on("response", self._response)
        self.page.on("pageerror", lambda error: self.problems.append(f"script error: {error}"))

    def _request(self, request: Request) -> None:
        url = urlsplit(request.url)
        if url.scheme not in {"data", "blob", "file"} and url.hostname != "127.0.0.1":
            self.problems.append(f"asks the network for {request.url}")

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.problems.append(f"console {message.type}: {message.text}")

    def _response(self, response: Response) -> None:
        if response.status >= 400:
            self.problems.append(f"HTTP {response.status} for {response.url}")

    def open(self, url: str) -> Page:
        self.page.goto(url, wait_until="load")
        self.page.evaluate("() => window.MathJax?.startup?.promise")
        self.page.evaluate("() => document.fonts.ready")
        return self.page


#: Takes the theme and the width of a window.
Visitor = Callable[..., Visit]


def new_context(browser: Browser, theme: str, width: int) -> BrowserContext:
    context = browser.new_context(
        color_scheme="dark" if theme == "dark" else "light",
        viewport={"width": width, "height": 900},
        has_touch=width < 600,
        reduced_motion="reduce",  # so that a widget starts when a test says so
    )
    context.set_default_timeout(TIMEOUT)
    return context


@pytest.fixture(scope="session")
def free_tabs() -> dict[bool, list[Visit]]:
    """Tabs that know fingers, and tabs that do not."""
    return {True: [], False: []}


@pytest.fixture
def visit(
    browser: Browser, server: str, site: Path, free_tabs: dict[bool, list[Visit]]
) -> Iterator[Visitor]:
    """A reader's first visit, with nothing stored: `visit(theme="dark", width=375)`.

    The tab may have been another reader's: what it loaded stays, which halves the time of a page.
    A test that changes more than its page, or looks at what is loaded, says `fresh=True`.
    """
    lent: list[tuple[Visit, list[Visit]]] = []
    closing: list[BrowserContext] = []

    def start(theme: str = "light", width: int = 1280, fresh: bool = False) -> Visit:
        free = free_tabs[width < 600]
        if fresh or not free:
            view = Visit(new_context(browser, theme, width).new_page())
        else:
            view = free.pop()
            view.page.set_viewport_size({"width": width, "height": 900})
            view.page.emulate_media(
                color_scheme="dark" if theme == "dark" else "light", reduced_motion="reduce"
            )
        if fresh:
            closing.append(view.page.context)
        else:
            lent.append((view, free))
        return view

    yield start
    for context in closing:
        context.close()
    for view, free in lent:
        forget(view, server if view.page.url.startswith(server) else site.as_uri())
        free.append(view)


def forget(view: Visit, root: str) -> None:
    """What a reader did: other tabs, and what is stored, also by a page that is left."""
    for page in view.page.context.pages:
        if page is not view.page:
            page.close()
    view.page.goto(f"{root}/_static/mathjax-license.txt")
    view.page.evaluate("localStorage.clear(); sessionStorage.clear()")
    view.page.context.clear_cookies()
    view.problems.clear()


@pytest.fixture(scope="session")
def reader(browser: Browser) -> Visit:
    """One tab for all pages: the browser's cache stays, and no new process starts for each."""
    return Visit(new_context(browser, "light", 1280).new_page())
