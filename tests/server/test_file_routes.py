"""`/v1/files`: stored documents, their pages as pictures, and who may see them."""

import functools
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from document_server import DAMAGED, TEXT, OwnerByHeader, error_code, scripted
from live_server import LiveServer, serving, wait_until
from PIL import Image
from reportlab.pdfgen import canvas

from mmserve.vision.pages import PageReader

pytest_plugins = ["document_fixtures"]


@functools.cache
def two_pages() -> bytes:
    buffer = io.BytesIO()
    drawing = canvas.Canvas(buffer, pagesize=(400, 600))
    for text in ("first", "second"):
        drawing.drawString(72, 500, f"This is the {text} page of a short document.")
        drawing.showPage()
    drawing.save()
    return buffer.getvalue()


@pytest.fixture(scope="module")
def server(reader: PageReader, places: tuple[Path, Path]) -> Iterator[LiveServer]:
    data_dir, upload_dir = places
    with serving(scripted(), reader=reader, data_dir=data_dir, upload_dir=upload_dir, middleware=OwnerByHeader) as live:
        yield live


def stored(api: httpx.Client, content: bytes = TEXT, name: str = "a.txt", owner: str = "local") -> dict[str, Any]:
    response = api.post("/v1/files", files={"file": (name, content)}, headers={"x-owner": owner})
    assert response.status_code == 200, response.text
    file: dict[str, Any] = response.json()
    return file


def bytes_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and "mmserve.db" not in path.name]


def test_a_file_is_stored_told_of_and_given_back(api: httpx.Client) -> None:
    file = stored(api, two_pages(), "Übersicht.pdf")
    assert (file["object"], file["media_type"], file["num_pages"]) == ("file", "application/pdf", 2)
    assert (file["filename"], file["bytes"]) == ("Übersicht.pdf", len(two_pages()))
    assert file["expires_at"] - file["created_at"] == 7 * 24 * 3600
    assert api.get(f"/v1/files/{file['id']}").json() == file
    content = api.get(f"/v1/files/{file['id']}/content")
    assert content.content == two_pages()
    assert content.headers["content-type"] == "application/pdf"
    assert content.headers["x-content-type-options"] == "nosniff"
    disposition = content.headers["content-disposition"]
    assert disposition == "attachment; filename=\"_bersicht.pdf\"; filename*=UTF-8''%C3%9Cbersicht.pdf"


@pytest.mark.parametrize("name", ['a"; filename=b.exe', "a\\b.txt", "100%.txt", "naïve\u2028.txt"])
def test_no_name_leaves_its_place_in_the_header(api: httpx.Client, name: str) -> None:
    file = stored(api, name=name)
    disposition = api.get(f"/v1/files/{file['id']}/content").headers["content-disposition"]
    plain, extended = disposition.removeprefix('attachment; filename="').split("\"; filename*=UTF-8''")
    assert '"' not in plain
    assert extended.isascii()
    assert httpx.URL(f"http://h/?{extended}").params is not None


def test_files_are_listed_the_newest_first_and_in_parts(api: httpx.Client) -> None:
    ids = [stored(api, name=f"{number}.txt", owner="lister")["id"] for number in range(3)]
    mine = {"x-owner": "lister"}
    first = api.get("/v1/files", params={"limit": 2}, headers=mine).json()
    assert ([file["id"] for file in first["data"]], first["has_more"]) == (ids[:0:-1], True)
    rest = api.get("/v1/files", params={"limit": 2, "after": ids[1]}, headers=mine).json()
    assert ([file["id"] for file in rest["data"]], rest["has_more"]) == (ids[:1], False)
    assert error_code(api.get("/v1/files", params={"limit": 0})) == (400, "invalid_request")
    assert api.get("/v1/files", params={"limit": 1000}).json()["error"]["param"] == "limit"


@pytest.mark.parametrize("place", ["", "/content", "/pages/1"])
def test_a_file_of_another_owner_is_not_there(api: httpx.Client, place: str) -> None:
    file = stored(api, two_pages(), "a.pdf", owner="ann")
    path = f"/v1/files/{file['id']}{place}"
    assert api.get(path, headers={"x-owner": "ann"}).status_code == 200
    assert error_code(api.get(path, headers={"x-owner": "bob"})) == (404, "not_found")
    assert error_code(api.delete(f"/v1/files/{file['id']}", headers={"x-owner": "bob"})) == (404, "not_found")
    assert api.get("/v1/files", headers={"x-owner": "bob"}).json()["data"] == []


@pytest.mark.parametrize("file_id", ["file-1", "x", "..", "%00", "file-" + "0" * 36, "job-" + "0" * 36, "é"])
def test_an_id_of_nothing_is_not_there(api: httpx.Client, file_id: str) -> None:
    for place in ("", "/content", "/pages/1"):
        assert api.get(f"/v1/files/{file_id}{place}").status_code == 404
    assert api.delete(f"/v1/files/{file_id}").status_code in (404, 405)


def test_pages_are_drawn_and_kept_with_the_file(
    api: httpx.Client, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = stored(api, two_pages(), "a.pdf")
    path = f"/v1/files/{file['id']}/pages"
    first, second = (api.get(f"{path}/{number}", params={"width": 200}) for number in (1, 2))
    assert first.headers["content-type"] == "image/png"
    assert first.headers["cache-control"].startswith("private")
    assert Image.open(io.BytesIO(first.content)).size == (200, 300)
    assert first.content != second.content
    monkeypatch.setattr(PageReader, "draw", None)
    assert api.get(f"{path}/1", params={"width": 200}).content == first.content
    before = len(bytes_under(places[0]))
    api.delete(f"/v1/files/{file['id']}")
    assert len(bytes_under(places[0])) == before - 3


def test_who_asks_for_every_width_does_not_fill_the_disk(api: httpx.Client, places: tuple[Path, Path]) -> None:
    file = stored(api, two_pages(), "a.pdf")
    before = len(bytes_under(places[0]))
    for width in range(20, 32):
        drawn = api.get(f"/v1/files/{file['id']}/pages/1", params={"width": width})
        assert Image.open(io.BytesIO(drawn.content)).width == width
    assert len(bytes_under(places[0])) == before + 8


@pytest.mark.parametrize(
    ("place", "status", "code"),
    [
        ("/pages/3", 404, "not_found"),
        ("/pages/0", 400, "invalid_request"),
        ("/pages/x", 400, "invalid_request"),
        ("/pages/1?width=5", 400, "invalid_request"),
        ("/pages/1?width=99999", 400, "invalid_request"),
    ],
)
def test_pages_that_are_not_there_are_refused(api: httpx.Client, place: str, status: int, code: str) -> None:
    file = stored(api, two_pages(), "a.pdf")
    assert error_code(api.get(f"/v1/files/{file['id']}{place}")) == (status, code)


def test_a_text_has_no_pictures(api: httpx.Client) -> None:
    assert error_code(api.get(f"/v1/files/{stored(api)['id']}/pages/1")) == (415, "unsupported_type")


def test_deleting_removes_the_bytes_and_the_answers(api: httpx.Client, places: tuple[Path, Path]) -> None:
    content = TEXT + b"Once only.\n"
    before = bytes_under(places[0])
    file = stored(api, content)
    asked = {"file_id": file["id"]}
    assert [api.post("/v1/summarize", json=asked).json()["cached"] for _ in range(2)] == [False, True]
    deleted = api.delete(f"/v1/files/{file['id']}")
    assert deleted.json() == {"id": file["id"], "object": "file", "deleted": True}
    assert error_code(api.get(f"/v1/files/{file['id']}")) == (404, "not_found")
    assert error_code(api.post("/v1/summarize", json=asked)) == (404, "not_found")
    assert bytes_under(places[0]) == before
    assert api.post("/v1/summarize", files={"file": content}).json()["cached"] is False


def test_what_cannot_be_read_or_is_no_upload_is_refused_and_leaves_nothing(
    api: httpx.Client, places: tuple[Path, Path]
) -> None:
    data_dir, upload_dir = places
    before = bytes_under(data_dir)
    assert error_code(api.post("/v1/files", files={"file": ("bad.pdf", DAMAGED)})) == (422, "corrupt_document")
    assert error_code(api.post("/v1/files", files={"file": ("a", b"\x7fELF\0\1\2")})) == (415, "unsupported_type")
    assert error_code(api.post("/v1/files", files=[("file", b"a"), ("file", b"b")])) == (400, "invalid_request")
    assert error_code(api.post("/v1/files", json={"file": "a"})) == (415, "unsupported_type")
    assert error_code(api.post("/v1/files", files={"file": TEXT}, data={"colour": "red"})) == (400, "invalid_request")
    assert bytes_under(data_dir) == before
    wait_until(lambda: not list(upload_dir.iterdir()))
    assert api.post("/v1/files", files={"file": TEXT}, data={"purpose": "user_data"}).status_code == 200


def test_files_need_no_model_but_a_server_that_stays(reader: PageReader) -> None:
    with serving(scripted(state="starting"), reader=reader, shutdown_timeout=5.0) as server:
        url = f"{server.url}/v1/files"
        assert httpx.post(url, files={"file": TEXT}).status_code == 200
        server.app.state.server.drain.begun.set()
        assert error_code(httpx.post(url, files={"file": TEXT})) == (503, "shutting_down")
