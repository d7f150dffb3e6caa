"""A command over documents, from its flags to its exit code."""

import json
import os
from pathlib import Path

import cli_fakes
import pytest
from cli_fakes import Invoke

from mmserve.weights import hub

pytest_plugins = ["cli_fixtures"]
pytestmark = pytest.mark.usefixtures("empty_place")

QUIET_MODEL = ("--model", "some/model")


def write(texts: dict[str, str], root: str = ".") -> None:
    for name, text in texts.items():
        path = Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def outputs(root: str = "out") -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for path in sorted(Path(root).rglob("*"))
        if path.is_file() and not path.name.startswith(".mmserve-done")
    }


def test_one_file_goes_to_standard_output_alone(invoke: Invoke) -> None:
    write({"a.txt": "one"})
    result = invoke("shout", "a.txt", *QUIET_MODEL)
    assert result.exit_code == 0
    assert result.stdout == "# a.txt\n\nONE\n"
    assert result.stderr == ""
    assert os.listdir() == ["a.txt"]
    assert cli_fakes.events == ["start some/model None True", "close"]


def test_the_embedded_model_is_said_to_be_a_demonstration(invoke: Invoke) -> None:
    write({"a.txt": "one"})
    assert invoke("shout", "a.txt").stderr.strip() == hub.DEMO_NOTICE
    assert invoke("shout", "a.txt", "--quiet").stderr == ""


def test_a_folder_is_mirrored_under_full_names(invoke: Invoke) -> None:
    write({"in/a.txt": "one", "in/sub/a.txt": "two", "in/sub/a.pdf": "three", "in/notes.docx": "left out"})
    result = invoke("shout", "in", "-r", "-o", "out", *QUIET_MODEL)
    assert result.exit_code == 0
    assert outputs() == {
        "a.txt.md": "# a.txt\n\nONE\n",
        "sub/a.pdf.md": "# sub/a.pdf\n\nTHREE\n",
        "sub/a.txt.md": "# sub/a.txt\n\nTWO\n",
    }
    printed = f"\n{result.stdout}".split("\n# ")[1:]
    assert sorted(text.strip() for text in printed) == ["a.txt\n\nONE", "sub/a.pdf\n\nTHREE", "sub/a.txt\n\nTWO"]


def test_same_names_in_two_folders_do_not_collide(invoke: Invoke) -> None:
    write({"a/README.png": "one", "b/README.png": "two"})
    assert invoke("shout", "a", "b", "-o", "out", "-f", "jsonl", "-q", *QUIET_MODEL).exit_code == 0
    written = {name: json.loads(text)["text"] for name, text in outputs().items()}
    assert written == {"a/README.png.jsonl": "ONE", "b/README.png.jsonl": "TWO"}


def test_quiet_with_an_output_folder_prints_nothing(invoke: Invoke) -> None:
    write({"a.txt": "one"})
    result = invoke("shout", "a.txt", "-o", "out", "-q")
    assert (result.stdout, result.stderr) == ("", "")
    assert list(outputs()) == ["a.txt.md"]


def test_copies_are_written_under_their_own_names(invoke: Invoke) -> None:
    write({"in/a.txt": "same", "in/b.txt": "same"})
    assert invoke("shout", "in", "-o", "out", *QUIET_MODEL).exit_code == 0
    assert outputs() == {"a.txt.md": "# a.txt\n\nSAME\n", "b.txt.md": "# b.txt\n\nSAME\n"}


@pytest.mark.parametrize("paths", [["in"], ["in/a.txt", "in/b.txt"]])
def test_json_of_many_documents_is_one_array(invoke: Invoke, paths: list[str]) -> None:
    write({"in/a.txt": "one", "in/b.txt": "two"})
    result = invoke("shout", *paths, "-f", "json", *QUIET_MODEL)
    assert sorted(item["text"] for item in json.loads(result.stdout)) == ["ONE", "TWO"]


def test_json_of_one_document_is_an_object(invoke: Invoke) -> None:
    write({"a.txt": "ein Ü"})
    result = invoke("shout", "a.txt", "-f", "json", *QUIET_MODEL)
    assert json.loads(result.stdout) == {"name": "a.txt", "text": "EIN Ü", "num_pages": 2}
    assert "Ü" in result.stdout


def test_json_of_a_folder_where_all_failed_is_an_empty_array(invoke: Invoke) -> None:
    write({"in/a.txt": "bad"})
    result = invoke("shout", "in", "-f", "json", *QUIET_MODEL)
    assert result.exit_code == 1
    assert json.loads(result.stdout) == []


def test_jsonl_is_one_line_a_document(invoke: Invoke) -> None:
    write({"in/a.txt": "one\ntwo", "in/b.txt": "three"})
    result = invoke("shout", "in", "-f", "jsonl", *QUIET_MODEL)
    assert sorted(json.loads(line)["name"] for line in result.stdout.splitlines()) == ["a.txt", "b.txt"]


def test_standard_input_is_a_document(invoke: Invoke) -> None:
    result = invoke("shout", "-", "-o", "out", *QUIET_MODEL, input=b"piped")
    assert result.exit_code == 0
    assert result.stdout == "# stdin\n\nPIPED\n"
    assert list(outputs()) == ["stdin.md"]


def test_one_bad_document_among_five(invoke: Invoke) -> None:
    write({"in/a.txt": "1", "in/b.txt": "2", "in/c.txt": "bad", "in/d.txt": "4", "in/e.txt": "5"})
    result = invoke("shout", "in", "-o", "out", "--report", "errors.jsonl", *QUIET_MODEL)
    assert result.exit_code == 1
    assert list(outputs()) == ["a.txt.md", "b.txt.md", "d.txt.md", "e.txt.md"]
    assert result.stderr == ("mmserve: in/c.txt: It is cut off. (corrupt_document)\nDone: 4, 1 failed.\n")
    assert [json.loads(line) for line in Path("errors.jsonl").read_text().splitlines()] == [
        {"path": "in/c.txt", "code": "corrupt_document", "message": "It is cut off."}
    ]


def test_a_page_that_cannot_be_read_is_reported_and_the_document_done(invoke: Invoke) -> None:
    write({"a.txt": "large"})
    result = invoke("shout", "a.txt", "--report", "errors.jsonl", *QUIET_MODEL)
    assert result.exit_code == 0
    assert result.stderr == "mmserve: a.txt, page 2: It is too large. (page_too_large)\n"
    assert json.loads(Path("errors.jsonl").read_text())["page"] == 2


def test_a_report_without_failures_is_empty(invoke: Invoke) -> None:
    write({"a.txt": "one", "errors.jsonl": "of an earlier run"})
    assert invoke("shout", "a.txt", "--report", "errors.jsonl", *QUIET_MODEL).exit_code == 0
    assert Path("errors.jsonl").read_text() == ""


def test_fail_fast(invoke: Invoke) -> None:
    write({"in/a.txt": "bad", "in/b.txt": "two"})
    result = invoke("shout", "in", "--fail-fast", "-j", "1", *QUIET_MODEL)
    assert (result.exit_code, result.stdout) == (1, "")


def test_timeout(invoke: Invoke) -> None:
    write({"in/a.txt": "slow", "in/b.txt": "two"})
    result = invoke("shout", "in", "--timeout", "0.05", "--report", "errors.jsonl", *QUIET_MODEL)
    assert (result.exit_code, result.stdout) == (1, "# b.txt\n\nTWO\n")
    assert json.loads(Path("errors.jsonl").read_text())["code"] == "timeout"


def test_results_are_not_written_over_unasked(invoke: Invoke) -> None:
    write({"in/a.txt": "one", "in/b.txt": "two", "out/b.txt.md": "mine"})
    result = invoke("shout", "in", "-o", "out")
    assert result.exit_code == 2
    assert "out/b.txt.md exists" in result.stderr
    assert outputs() == {"b.txt.md": "mine"}
    assert cli_fakes.events == []
    assert invoke("shout", "in", "-o", "out", "--force").exit_code == 0
    assert outputs()["b.txt.md"] == "# b.txt\n\nTWO\n"


def test_resume_does_what_is_missing_or_has_changed(invoke: Invoke) -> None:
    write({"in/a.txt": "one", "in/b.txt": "bad", "in/c.txt": "three", "in/d.txt": "four"})
    assert invoke("shout", "in", "-o", "out", *QUIET_MODEL).exit_code == 1
    write({"in/b.txt": "two", "in/d.txt": "changed"})
    result = invoke("shout", "in", "-o", "out", "--resume", "-j", "1", *QUIET_MODEL)
    assert result.exit_code == 0
    assert result.stdout == "# b.txt\n\nTWO\n\n# d.txt\n\nCHANGED\n"
    assert len(outputs()) == 4


def test_resume_needs_no_model_when_all_is_done(invoke: Invoke) -> None:
    write({"in/a.txt": "one", "in/b.txt": "two"})
    invoke("shout", "in", "-o", "out", *QUIET_MODEL)
    cli_fakes.events.clear()
    result = invoke("shout", "in", "-o", "out", "--resume", *QUIET_MODEL)
    assert (result.exit_code, result.stdout) == (0, "")
    assert cli_fakes.events == []


@pytest.mark.parametrize(
    "changed", [("--greeting", "hi"), ("--model", "other/model"), ("--ocr", "off"), ("--dtype", "float32")]
)
def test_resume_does_again_what_other_options_made(invoke: Invoke, changed: tuple[str, str]) -> None:
    write({"in/a.txt": "one"})
    invoke("shout", "in", "-o", "out", *QUIET_MODEL)
    assert invoke("shout", "in", "-o", "out", "--resume", *QUIET_MODEL, "-j", "2").stdout == ""
    assert invoke("shout", "in", "-o", "out", "--resume", *QUIET_MODEL, *changed).stdout == "# a.txt\n\nONE\n"


def test_resume_passes_over_a_torn_journal_line(invoke: Invoke) -> None:
    write({"in/a.txt": "one"})
    invoke("shout", "in", "-o", "out", *QUIET_MODEL)
    journal = Path("out/.mmserve-done.jsonl")
    journal.write_text(journal.read_text() + '{"output": "b.t')
    assert invoke("shout", "in", "-o", "out", "--resume", *QUIET_MODEL).stdout == ""


def test_a_torn_journal_line_does_not_spoil_the_next(invoke: Invoke) -> None:
    write({"in/a.txt": "one"})
    invoke("shout", "in", "-o", "out", *QUIET_MODEL)
    journal = Path("out/.mmserve-done.jsonl")
    journal.write_text(journal.read_text() + '{"output": "b.t')
    write({"in/b.txt": "two"})
    assert invoke("shout", "in", "-o", "out", "--resume", *QUIET_MODEL).stdout == "# b.txt\n\nTWO\n"
    assert invoke("shout", "in", "-o", "out", "--resume", *QUIET_MODEL).stdout == ""


@pytest.mark.parametrize("output_format", ["md", "json", "jsonl"])
def test_resume_knows_a_document_that_was_moved(invoke: Invoke, output_format: str) -> None:
    write({"in/a.txt": "one", "in/b.txt": "two"})
    invoke("shout", "in", "-r", "-o", "out", "-f", output_format, *QUIET_MODEL)
    Path("in/sub").mkdir()
    Path("in/a.txt").rename("in/sub/moved.txt")
    cli_fakes.events.clear()
    assert invoke("shout", "in", "-r", "-o", "out", "--resume", "-f", output_format, *QUIET_MODEL).exit_code == 0
    assert cli_fakes.events == []
    moved = outputs()[f"sub/moved.txt.{output_format}"]
    assert moved == outputs()[f"a.txt.{output_format}"].replace("a.txt", "sub/moved.txt")
    fresh = invoke("shout", "in", "-r", "-o", "fresh", "-f", output_format, *QUIET_MODEL)
    assert fresh.exit_code == 0
    assert outputs("fresh")[f"sub/moved.txt.{output_format}"] == moved


def test_the_report_of_a_resumed_run_has_the_pages_of_earlier_runs(invoke: Invoke) -> None:
    write({"in/a.txt": "large", "in/b.txt": "bad"})
    run = ("shout", "in", "-o", "out", "--report", "errors.jsonl", *QUIET_MODEL)
    assert invoke(*run).exit_code == 1
    first = Path("errors.jsonl").read_text()
    assert len(first.splitlines()) == 2
    result = invoke(*run, "--resume")
    assert sorted(Path("errors.jsonl").read_text().splitlines()) == sorted(first.splitlines())
    assert "a.txt" not in result.stderr
    Path("in/b.txt").unlink()
    Path("in/a.txt").rename("in/c.txt")
    assert invoke(*run, "--resume").exit_code == 0
    assert json.loads(Path("errors.jsonl").read_text())["path"] == "in/c.txt"


def test_resume_is_right_about_documents_that_changed_places(invoke: Invoke) -> None:
    write({"in/a.txt": "one", "in/b.txt": "two"})
    invoke("shout", "in", "-o", "out", *QUIET_MODEL)
    write({"in/a.txt": "two", "in/b.txt": "one"})
    assert invoke("shout", "in", "-o", "out", "--resume", *QUIET_MODEL).exit_code == 0
    assert outputs() == {"a.txt.md": "# a.txt\n\nTWO\n", "b.txt.md": "# b.txt\n\nONE\n"}
    assert invoke("shout", "in", "-o", "out", "--resume", *QUIET_MODEL).stdout == ""


def test_what_a_killed_run_had_begun_to_write_is_taken_away(invoke: Invoke) -> None:
    write({"in/sub/a.txt": "one", "out/sub/.mmserve-00ff.part": "half a res"})
    assert invoke("shout", "in", "-r", "-o", "out", "--dry-run", *QUIET_MODEL).exit_code == 0
    assert Path("out/sub/.mmserve-00ff.part").exists()
    assert invoke("shout", "in", "-r", "-o", "out", *QUIET_MODEL).exit_code == 0
    assert list(outputs()) == ["sub/a.txt.md"]


def test_an_overload_that_passes_is_no_failure(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmserve.pipelines.batch._Batch._delay", lambda _batch, _attempt: 0.0)
    monkeypatch.setattr(cli_fakes, "num_refused", 2)
    write({"a.txt": "busy"})
    assert invoke("shout", "a.txt", "--retries", "1", *QUIET_MODEL).exit_code == 1
    monkeypatch.setattr(cli_fakes, "num_refused", 2)
    assert invoke("shout", "a.txt", *QUIET_MODEL).stdout == "# a.txt\n\nBUSY\n"


def test_outputs_inside_the_input_folder_are_not_inputs(invoke: Invoke) -> None:
    write({"in/a.txt": "one", "in/out/old.txt": "an output"})
    result = invoke("shout", "in", "-r", "--include", "*", "-o", "in/out", *QUIET_MODEL)
    assert result.stdout == "# a.txt\n\nONE\n"


def test_dry_run_says_what_would_be_done(invoke: Invoke) -> None:
    write({"in/a.txt": "one", "in/b.txt": "two"})
    assert invoke("shout", "in", "--dry-run").stdout == "in/a.txt\nin/b.txt\n"
    assert invoke("shout", "in", "-o", "out", "--dry-run").stdout == (
        "in/a.txt -> out/a.txt.md\nin/b.txt -> out/b.txt.md\n"
    )
    assert cli_fakes.events == []
    assert not Path("out").exists()


def test_dry_run_does_not_wait_for_a_pipe(invoke: Invoke) -> None:
    Path("in").mkdir()
    os.mkfifo("in/c.txt")
    assert invoke("shout", "in", "-o", "out", "--dry-run").stdout == "in/c.txt -> out/c.txt.md\n"


def test_dry_run_leaves_out_what_is_done(invoke: Invoke) -> None:
    write({"in/a.txt": "one"})
    invoke("shout", "in", "-o", "out", *QUIET_MODEL)
    write({"in/b.txt": "two"})
    result = invoke("shout", "in", "-o", "out", "--dry-run", "--resume", *QUIET_MODEL)
    assert result.stdout == "in/b.txt -> out/b.txt.md\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere.pdf"], "nowhere.pdf does not exist"),
        ([""], "an empty name stands for no file"),
        (["a.txt", ""], "an empty name stands for no file"),
        (["a.txt", "-o", ""], "an empty name stands for no file"),
        (["a.txt", "-o", "a.txt/b"], "a.txt/b cannot be written to: Not a directory"),
        (["a.txt", "-o", "/proc/self"], "/proc/self cannot be written to"),
        (["empty"], "no documents found"),
        (["a.txt", "--resume"], "need --output-dir"),
        (["a.txt", "-o", "out", "--resume", "--force"], "choose one"),
        (["a.txt", "-o", "a.txt"], "a.txt is not a folder"),
        (["a.txt", "--timeout", "0"], "--timeout must be above 0"),
        (["a.txt", "--kv-cache-memory-bytes", "lots"], "'lots' is not a size"),
        (["a.txt", "-f", "xml"], "xml"),
        (["a.txt", "--jobs", "0"], "--jobs"),
        (["a.txt", "--no-such-option"], "--no-such-option"),
        ([], "Missing argument"),
        (["a.txt", "--report", "no/such/folder/errors.jsonl"], "errors.jsonl"),
    ],
)
def test_usage_errors(invoke: Invoke, arguments: list[str], sentence: str) -> None:
    write({"a.txt": "one"})
    Path("empty").mkdir()
    result = invoke("shout", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_folder_of_other_files_says_so(invoke: Invoke) -> None:
    write({"in/a.docx": "one", "in/sub/b.txt": "two"})
    assert "other files left out: 1; --include '*' takes them" in invoke("shout", "in").stderr
    assert "-r goes into subfolders" in invoke("shout", "in").stderr


def test_a_missing_model_ends_with_3(invoke: Invoke) -> None:
    write({"in/a.txt": "one", "in/b.txt": "two"})
    result = invoke("shout", "in", "--model", "missing")
    assert result.exit_code == 3
    assert result.stderr == "mmserve: there is no model 'missing'\n"


def test_a_file_name_cannot_steer_the_terminal(invoke: Invoke) -> None:
    name = "a\x1b[31m.txt"
    write({name: "bad"})
    result = invoke("shout", name, *QUIET_MODEL)
    assert result.exit_code == 1
    assert "\x1b" not in result.stderr


def test_a_file_name_that_is_not_text(invoke: Invoke) -> None:
    name = os.fsdecode(b"in/caf\xe9.txt")
    write({name: "one"})
    result = invoke("shout", "in", "-o", "out", "-f", "json", *QUIET_MODEL)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)[0]["text"] == "ONE"
    assert os.listdir(b"out") != []
