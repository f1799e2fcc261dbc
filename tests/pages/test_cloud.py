"""Notebooks for services that open them in a browser."""

from __future__ import annotations

import json

import cloud
import gallery
import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

REPOSITORY = "https://github.com/somebody/lm_from_scratch"
WANTED = cloud.release(REPOSITORY)


@pytest.fixture(scope="module")
def held() -> dict[str, str]:
    """What the branch holds."""
    return {place.as_posix(): text for place, text in cloud.files(WANTED)}


def test_without_a_repository_there_are_no_links() -> None:
    assert cloud.links("", "auto_tutorials/1_gpt2/1_tokens") == {}
    assert cloud.links("https://example.org/a/b", "auto_tutorials/1_gpt2/1_tokens") == {}


def test_links_lead_to_files_of_the_branch(held: dict[str, str]) -> None:
    documents = [gallery.document(page).lstrip("/") for page in gallery.in_order()]
    for document in [*documents, "exercises/rms_norm"]:
        found = cloud.links(REPOSITORY, document)
        assert found.keys() == cloud.SERVICES.keys()
        for url in found.values():
            assert "/somebody/lm_from_scratch/" in url
            assert (
                url.rpartition("notebooks")[2].removeprefix("?urlpath=lab/tree").strip("/") in held
            )
    others = ("index", "proof", "your_package")
    for document in ("index", "glossary", *(f"exercises/{name}" for name in others)):
        assert cloud.links(REPOSITORY, document) == {}


def test_an_address_may_be_that_of_a_clone() -> None:
    page = "auto_tutorials/1_gpt2/1_tokens"
    expected = cloud.links(REPOSITORY, page)
    assert cloud.links(f"{REPOSITORY}.git", page) == cloud.links(f"{REPOSITORY}/", page) == expected


def test_a_notebook_begins_with_the_release(held: dict[str, str]) -> None:
    version = cloud.project()["project"]["version"]
    assert f"lm_from_scratch[lab] @ git+{REPOSITORY}@v{version}" == WANTED
    notebooks = [text for place, text in held.items() if place.endswith(".ipynb")]
    assert len(notebooks) > 200
    for text in notebooks:
        notebook = json.loads(text)
        nbformat.validate(notebook)
        code = "".join(notebook["cells"][0]["source"])
        compile(TransformerManager().transform_cell(code), "<first cell>", "exec")
        assert f'%pip install --quiet "{WANTED}"' in code
    assert held["requirements.txt"] == f"{WANTED}\n" and "README.md" in held


def test_the_command_asks_for_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud, "address", lambda: "")
    monkeypatch.setattr("sys.argv", ["cloud.py", "folder"])
    with pytest.raises(SystemExit, match="Repository, in"):
        cloud.main()
