"""Makes the pictures of the page in docs/screenshots, with a scripted engine and a document of samples/.

python tests/server/page_screenshots.py docs/screenshots
"""

import sys
import tempfile
from pathlib import Path

from live_server import serving
from page_driver import chromium, opened
from playwright.sync_api import Browser, expect
from scripted_engine import ScriptedEngine

from mmserve.vision.pages import PageReader

SAMPLE = Path(__file__).parents[2] / "samples" / "lease-mixed.pdf"
PHONE = {"width": 390, "height": 800}


# Sentences that stand on its pages, as a model would write them.
ANSWER = (
    "The lease runs for six years from 1 October 2024 to 30 September 2030. "
    "The rent is £1,875 a month, payable in advance on the first day of each month. "
    "The tenant keeps the inside in repair and has the wiring tested every 12 months. "
    "The landlord insures the building for £640,000."
)


def take(browser: Browser, url: str, folder: Path) -> None:
    with opened(browser, url, viewport={"width": 1100, "height": 760}) as page:
        page.get_by_label("Choose documents").set_input_files(SAMPLE)
        page.get_by_role("button", name="Start").click()
        expect(page.locator(".card")).to_contain_text("Done", timeout=120_000)
        expect(page.locator(".pages button img").first).to_be_visible()
        page.wait_for_timeout(1500)
        page.screenshot(path=folder / "summary.png")
        page.locator(".cite").first.click()
        expect(page.locator("#viewer-picture")).to_be_visible()
        page.locator("#viewer-picture").evaluate("image => image.decode()")
        page.screenshot(path=folder / "citation.png")
    with opened(browser, url, viewport=PHONE, color_scheme="dark") as page:
        page.get_by_label("Choose documents").set_input_files(SAMPLE)
        page.get_by_role("button", name="Start").click()
        expect(page.locator(".card")).to_contain_text("Done", timeout=120_000)
        page.locator(".card").scroll_into_view_if_needed()
        page.screenshot(path=folder / "phone-dark.png")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    engine = ScriptedEngine(answer=ANSWER, max_model_len=30_000)
    with tempfile.TemporaryDirectory() as data, chromium() as browser:
        reader = PageReader(num_workers=1)
        try:
            with serving(engine, reader=reader, data_dir=Path(data)) as live:
                take(browser, live.url, folder)
        finally:
            reader.close()


if __name__ == "__main__":
    main()
