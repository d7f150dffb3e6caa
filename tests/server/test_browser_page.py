"""The page at `/` in Chromium, by mouse and by keyboard, in both color schemes and on a phone's width."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import serving, wait_until
from page_driver import SENTENCES, chromium, opened, three_pages
from playwright.sync_api import Browser, Dialog, FilePayload, Page, expect
from scripted_engine import ScriptedEngine

from mmserve.server.access import KeyRing
from mmserve.server.settings import AccessSettings
from mmserve.vision.pages import PageReader

pytest_plugins = ["document_fixtures"]

# A loaded machine takes its time.
expect.set_options(timeout=20_000)

ANSWER = " ".join(SENTENCES)
DAMAGED: FilePayload = {"name": "broken.pdf", "mimeType": "application/pdf", "buffer": b"%PDF-1.7\n" + b"\0" * 200}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(answer=ANSWER, max_model_len=30_000)


@pytest.fixture
def url(engine: ScriptedEngine, reader: PageReader, tmp_path: Path) -> Iterator[str]:
    with serving(engine, reader=reader, data_dir=tmp_path / "data") as live:
        yield live.url


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    with opened(browser, url) as shown:
        yield shown


def submit(page: Page, *files: FilePayload, task: str = "Summarise", **fields: str) -> None:
    page.get_by_label("Choose documents").set_input_files(list(files))
    page.get_by_role("radio", name=task).check()
    for label, value in fields.items():
        page.locator("#order").get_by_label(label).fill(value)
    page.get_by_role("button", name="Start").click()


def card(page: Page, name: str = "invoice.pdf") -> Any:
    return page.get_by_role("article", name=name, exact=True)


def test_a_summary_is_written_and_its_citations_open_their_pages(page: Page) -> None:
    submit(page, three_pages())
    expect(card(page)).to_contain_text("Done")
    expect(card(page).locator(".answer")).to_contain_text("The total is 1,284.50 EUR. p. 2")
    expect(card(page).get_by_role("button", name="Show page 3").first).to_be_visible()
    expect(card(page).locator(".pages img")).to_have_count(3)
    card(page).locator(".cite", has_text="p. 2").click()
    viewer = page.get_by_role("dialog", name="invoice.pdf, page 2 of 3")
    expect(viewer.get_by_role("img", name="invoice.pdf, page 2 of 3")).to_be_visible()
    assert viewer.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)") > 400
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("dialog", name="invoice.pdf, page 3 of 3")).to_be_visible()
    expect(page.get_by_role("button", name="Next page")).to_be_disabled()
    page.keyboard.press("Escape")
    expect(page.locator("#viewer")).to_be_hidden()


def test_the_text_appears_while_it_is_written(page: Page, engine: ScriptedEngine) -> None:
    engine.answer = f"{SENTENCES[1]} {SENTENCES[2]}"
    engine.seconds_per_token = 0.3
    submit(page, three_pages())
    answer = card(page).locator(".answer")
    expect(answer).to_contain_text(SENTENCES[1], timeout=30_000)
    assert SENTENCES[2] not in answer.inner_text()
    engine.seconds_per_token = 0.0
    expect(card(page)).to_contain_text("Done")
    expect(answer).to_contain_text(SENTENCES[2])


def test_cancelling_stops_the_engine(page: Page, engine: ScriptedEngine) -> None:
    engine.seconds_per_token = 0.2
    submit(page, three_pages())
    wait_until(lambda: engine.started)
    card(page).get_by_role("button", name="Cancel").click()
    expect(card(page)).to_contain_text("Cancelled")
    wait_until(lambda: engine.aborted)
    assert not engine.finished
    expect(card(page).get_by_role("button", name="Cancel")).to_be_hidden()


def test_an_error_is_a_sentence_beside_the_document_it_is_about(page: Page) -> None:
    submit(page, DAMAGED, three_pages())
    alert = card(page, "broken.pdf").get_by_role("alert")
    expect(alert).to_have_text(re.compile(r"broken\.pdf.*[a-z]{4,}"))
    expect(card(page, "broken.pdf")).to_contain_text("Failed")
    expect(card(page)).to_contain_text("Done")


def test_nothing_chosen_is_said(page: Page) -> None:
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_role("alert").filter(has_text="Choose a document first.")).to_be_visible()


def test_asking_again_needs_no_second_upload(page: Page, engine: ScriptedEngine) -> None:
    submit(page, three_pages())
    expect(card(page)).to_contain_text("Done")
    question = "What is the total?"
    engine.answer = SENTENCES[1]
    card(page).get_by_label("Ask about this document").fill(question)
    page.keyboard.press("Enter")
    again = card(page, f"invoice.pdf: {question}")
    expect(again).to_contain_text("Done")
    expect(again.locator(".answer")).to_contain_text("The total is 1,284.50 EUR. p. 2")
    assert any(question in prompt for prompt in engine.prompts)
    again.locator(".cite").first.click()
    expect(page.get_by_role("dialog", name="invoice.pdf, page 2 of 3")).to_be_visible()


def test_results_can_be_saved(page: Page) -> None:
    submit(page, three_pages())
    with page.expect_download() as waiting:
        card(page).get_by_role("button", name="Download JSON").click()
    assert waiting.value.suggested_filename == "invoice.json"
    saved = json.loads(Path(waiting.value.path()).read_text())
    assert saved["citations"][1] == {"sentence": SENTENCES[1], "pages": [2], "origin": "model"}
    with page.expect_download() as waiting:
        card(page).get_by_role("button", name="Download Markdown").click()
    assert Path(waiting.value.path()).read_text().startswith("# invoice.pdf\n\n")


def test_a_document_is_deleted_with_its_results(page: Page, url: str) -> None:
    submit(page, three_pages())
    expect(card(page)).to_contain_text("Done")
    asked: list[str] = []
    page.on("dialog", lambda dialog: asked.append(dialog.message))
    for answer in (Dialog.dismiss, Dialog.accept):
        expect(card(page)).to_have_count(1)
        page.once("dialog", answer)
        card(page).get_by_role("button", name="Delete document and results").click()
    expect(card(page)).to_have_count(0)
    assert asked == ["Delete invoice.pdf and its result from the server? This cannot be undone."] * 2
    for kind in ("files", "jobs"):
        assert page.request.get(f"{url}/v1/{kind}").json()["data"] == []


def test_a_document_is_deleted_with_what_was_asked_again(page: Page, url: str) -> None:
    submit(page, three_pages())
    expect(card(page)).to_contain_text("Done")
    card(page).get_by_label("Ask about this document").fill("What is the total?")
    page.keyboard.press("Enter")
    expect(card(page, "invoice.pdf: What is the total?")).to_contain_text("Done")
    page.once("dialog", Dialog.accept)
    card(page).get_by_role("button", name="Delete document and results").click()
    expect(page.locator(".card")).to_have_count(0)
    for kind in ("files", "jobs"):
        assert page.request.get(f"{url}/v1/{kind}").json()["data"] == []


def test_markup_in_documents_and_names_stays_text(page: Page, engine: ScriptedEngine) -> None:
    name = "<img src=x onerror=alert(1)>.txt"
    text = "The <b>total</b> is <script>alert(1)</script> 12 EUR."
    engine.answer = text
    submit(page, {"name": name, "mimeType": "text/plain", "buffer": text.encode()})
    shown = page.locator(".card")
    expect(shown).to_contain_text("Done")
    expect(shown.locator("h2")).to_have_text(name)
    assert shown.locator(".answer b, .answer script, h2 img").count() == 0


def test_all_of_it_works_by_keyboard(page: Page) -> None:
    page.get_by_label("Choose documents").set_input_files([three_pages()])
    page.get_by_label("Choose documents").focus()
    for _ in range(8):
        if page.evaluate("document.activeElement.value") == "summarize":
            break
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.value") == "ask"
    page.keyboard.press("Tab")
    page.keyboard.type("What is the total?")
    page.keyboard.press("Enter")
    expect(card(page)).to_contain_text("Done")
    citation = card(page).locator(".cite").first
    citation.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#viewer")).to_be_visible()
    page.keyboard.press("Escape")
    expect(citation).to_be_focused()


def test_a_phone_shows_it_without_scrolling_sideways(browser: Browser, url: str) -> None:
    with opened(browser, url, viewport={"width": 360, "height": 740}) as page:
        submit(page, three_pages("a-very-long-name-" * 6 + ".pdf"))
        expect(page.locator(".card")).to_contain_text("Done")
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 360


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
def test_both_color_schemes_are_followed(browser: Browser, url: str, scheme: Any, is_dark: bool) -> None:
    with opened(browser, url, color_scheme=scheme) as page:
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(int(part) for part in re.findall(r"\d+", ground)[:3]) / 3
        assert (brightness < 80) == is_dark


def test_a_dropped_file_is_chosen(page: Page) -> None:
    page.evaluate(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File(["The total is 12 EUR."], "note.txt", { type: "text/plain" }));
          document.querySelector("#drop").dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
        }"""
    )
    expect(page.locator("#chosen")).to_have_text("Chosen: note.txt")


def test_a_text_file_is_shown_as_it_is(page: Page, engine: ScriptedEngine) -> None:
    engine.answer = "The total is 12 EUR."
    submit(page, {"name": "note.txt", "mimeType": "text/plain", "buffer": b"Pumps.\nThe total is 12 EUR.\n"})
    expect(card(page, "note.txt")).to_contain_text("Done")
    card(page, "note.txt").locator(".cite").click()
    viewer = page.get_by_role("dialog", name="note.txt")
    expect(viewer.locator("#viewer-text")).to_have_text("Pumps.\nThe total is 12 EUR.\n", use_inner_text=True)
    expect(viewer.get_by_role("button", name="Next page")).to_be_disabled()


def test_values_are_a_table_with_their_pages(page: Page, engine: ScriptedEngine) -> None:
    engine.answer = json.dumps({"vendor": "Hallam Pumps", "total": "1,284.50"})
    submit(page, three_pages(), task="Extract", **{"Fields, separated by commas": "vendor,total"})
    expect(card(page)).to_contain_text("Done")
    row = card(page).get_by_role("row", name=re.compile("total"))
    expect(row).to_contain_text("1,284.50")
    row.get_by_role("button", name="Show page 2").click()
    expect(page.get_by_role("dialog", name="invoice.pdf, page 2 of 3")).to_be_visible()


def test_a_transcript_is_shown_as_markdown(page: Page, engine: ScriptedEngine) -> None:
    submit(page, three_pages(), task="Transcribe")
    expect(card(page)).to_contain_text("Done")
    expect(card(page).locator(".answer pre")).to_contain_text(SENTENCES[1])
    assert not engine.prompts


def test_a_key_is_asked_for_and_kept_nowhere(
    browser: Browser, engine: ScriptedEngine, reader: PageReader, tmp_path: Path
) -> None:
    key = "a-key-for-the-tests-of-the-page"
    access = AccessSettings(keys=KeyRing([f"alice:{key}"]))
    with (
        serving(engine, reader=reader, data_dir=tmp_path / "data", access=access) as live,
        opened(browser, live.url) as page,
    ):
        dialog = page.get_by_role("dialog", name="API key")
        dialog.get_by_label("Key").fill("a-wrong-key-of-some-length")
        page.keyboard.press("Enter")
        dialog.get_by_label("Key").fill(key)
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("Ready: scripted")
        submit(page, three_pages())
        expect(card(page)).to_contain_text("Done")
        expect(card(page).locator(".pages img")).to_have_count(3)
        kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
        assert key not in kept
        assert key not in page.content()


def test_a_server_that_goes_away_is_said(
    browser: Browser, engine: ScriptedEngine, reader: PageReader, tmp_path: Path
) -> None:
    with serving(engine, reader=reader, data_dir=tmp_path / "gone") as live, opened(browser, live.url) as page:
        expect(page.locator("#state")).to_have_text("Ready: scripted")
        live.stop()
        submit(page, three_pages())
        expect(card(page).get_by_role("alert")).to_have_text("The server cannot be reached. Is it running?")
