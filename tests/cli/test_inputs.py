"""Which documents are found, under which names."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from mmserve.commands.inputs import DocumentFinder, Selection
from mmserve.errors import RequestError

pytest_plugins = ["cli_fixtures"]
pytestmark = pytest.mark.usefixtures("empty_place")

ALL = Selection(recursive=True)


def make(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)


def find(*arguments: str, selection: Selection = ALL, skipped: str | None = None) -> list[str]:
    finder = DocumentFinder([Path(a) for a in arguments], selection, None if skipped is None else Path(skipped))
    names = [source.name for source in finder]
    assert names == [source.name for source in finder]
    assert len(set(names)) == len(names)
    return names


def test_a_folder_names_its_documents_from_itself() -> None:
    make("in/b.pdf", "in/a.PNG", "in/sub/c.tiff")
    assert find("in") == ["a.PNG", "b.pdf", "sub/c.tiff"]
    assert find("in/") == ["a.PNG", "b.pdf", "sub/c.tiff"]
    assert find("in", selection=Selection()) == ["a.PNG", "b.pdf"]
    assert find(".") == ["in/a.PNG", "in/b.pdf", "in/sub/c.tiff"]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["x/one.pdf"], ["one.pdf"]),
        (["x/one.pdf", "x/two.pdf"], ["one.pdf", "two.pdf"]),
        (["x/one.pdf", "y/one.pdf"], ["x/one.pdf", "y/one.pdf"]),
        (["x", "y"], ["x/one.pdf", "x/two.pdf", "y/one.pdf"]),
        (["x/deep/same", "y/deep/same"], ["x/deep/same/a.pdf", "y/deep/same/a.pdf"]),
        (["x", "y/one.pdf"], ["y/one.pdf", "x/one.pdf", "x/two.pdf"]),
        (["x/../y"], ["one.pdf"]),
    ],
)
def test_arguments_are_told_apart_from_where_they_meet(arguments: Sequence[str], names: list[str]) -> None:
    make("x/one.pdf", "x/two.pdf", "y/one.pdf", "x/deep/same/a.pdf", "y/deep/same/a.pdf")
    assert find(*arguments, selection=Selection()) == names


def test_what_is_named_twice_is_found_once() -> None:
    make("in/a.pdf", "in/sub/b.pdf")
    assert find("in", "in", "in/sub", "in/a.pdf", "./in/a.pdf") == ["a.pdf", "sub/b.pdf"]


def test_a_loop_of_links_is_walked_once() -> None:
    make("d/a.pdf", "d/sub/b.pdf")
    os.symlink("..", "d/sub/up")
    os.symlink("sub", "d/again")
    assert find("d") == ["a.pdf", "again/b.pdf"]


def test_a_link_to_a_file_is_a_document_and_a_broken_one_a_problem() -> None:
    make("d/a.pdf")
    os.symlink("a.pdf", "d/b.pdf")
    os.symlink("nowhere", "d/c.pdf")
    problems = {source.name: source.problem is not None for source in DocumentFinder([Path("d")], ALL)}
    assert problems == {"a.pdf": False, "b.pdf": False, "c.pdf": True}


@pytest.mark.parametrize("name", ["self", "self.pdf"])
def test_a_link_to_itself_costs_no_other_file(name: str) -> None:
    make("d/a.pdf", "d/sub/b.pdf")
    os.symlink(name, f"d/{name}")
    problems = {source.name: source.problem is not None for source in DocumentFinder([Path("d")], ALL)}
    expected = {"a.pdf": False, "sub/b.pdf": False}
    assert problems == (expected | {name: True} if name.endswith(".pdf") else expected)


def test_the_output_folder_is_not_visited_unless_it_is_asked_for() -> None:
    make("in/a.pdf", "in/out/b.pdf")
    assert find("in", skipped="in/out") == ["a.pdf"]
    assert find("in", skipped="in") == ["a.pdf", "out/b.pdf"]
    assert find("in", "in/out", skipped="in/out") == ["a.pdf", "out/b.pdf"]


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        (Selection(recursive=True, include=["*.docx"]), ["c.docx"]),
        (Selection(recursive=True, include=["*"]), ["README", "a.pdf", "c.docx", "drafts/a.pdf", "old/2019/a.pdf"]),
        (Selection(recursive=True, include=["old/*"]), ["old/2019/a.pdf"]),
        (Selection(recursive=True, include=["**/a.pdf"]), ["a.pdf", "drafts/a.pdf", "old/2019/a.pdf"]),
        (Selection(recursive=True, exclude=["drafts"]), ["a.pdf", "old/2019/a.pdf"]),
        (Selection(recursive=True, exclude=["old/*", "drafts/a*"]), ["a.pdf"]),
        (Selection(recursive=True, include=["*.pdf"], exclude=["*/*"]), ["a.pdf"]),
    ],
)
def test_patterns(selection: Selection, names: list[str]) -> None:
    make("a.pdf", "c.docx", "README", "drafts/a.pdf", "old/2019/a.pdf", ".hidden.pdf", ".git/a.pdf")
    assert find(".", selection=selection) == names


def test_a_named_file_is_taken_whatever_it_is_called() -> None:
    make("in/notes.xyz", "in/.hidden")
    assert find("in/notes.xyz", "in/.hidden") == ["notes.xyz", ".hidden"]


def test_files_left_out_are_counted() -> None:
    make("in/a.pdf", "in/b.docx", "in/c.xlsx", "in/.DS_Store")
    finder = DocumentFinder([Path("in")], ALL)
    assert [source.name for source in finder] == ["a.pdf"]
    assert finder.num_left_out == 2


def test_a_missing_argument_and_a_pipe_are_refused() -> None:
    with pytest.raises(RequestError, match=r"gone\.pdf does not exist"):
        DocumentFinder([Path("gone.pdf")], ALL)
    os.mkfifo("pipe")
    with pytest.raises(RequestError, match="pipe is not a file or folder"):
        DocumentFinder([Path("pipe")], ALL)


def test_only_one_named_file_is_single() -> None:
    make("in/a.pdf", "b.pdf")
    assert DocumentFinder([Path("b.pdf")], ALL).is_single
    assert DocumentFinder([Path("-")], ALL).is_single
    assert not DocumentFinder([Path("in")], ALL).is_single
    assert not DocumentFinder([Path("b.pdf"), Path("-")], ALL).is_single
