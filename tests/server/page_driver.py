"""A real browser and documents for it; the server's engine is scripted, all else is real."""

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, FilePayload, Page, sync_playwright
from reportlab.lib.pagesizes import A5
from reportlab.pdfgen.canvas import Canvas

# Chromium's own services would ask for hosts that are not to be asked for.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SENTENCES = (
    "Invoice of Hallam Pumps for two pumps.",
    "The total is 1,284.50 EUR.",
    "Payment is due on 12 March 2026.",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's or any other Chromium that is installed."""
    path = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    assert path is not None, "the tests of the page need Chromium: apt install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, **settings: Any) -> Iterator[Page]:
    """The page at `url`. It may ask no other host for anything, and report nothing to the console."""
    context = browser.new_context(**settings)
    page = context.new_page()
    page.set_default_timeout(20_000)
    asked: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.goto(url)
    try:
        yield page
    finally:
        context.close()
    foreign = [one for one in asked if not one.startswith((url, "blob:", "data:"))]
    assert not foreign
    # A refused request is told to the console by Chromium itself.
    assert not [one for one in complaints if "Failed to load resource" not in one]


def three_pages(name: str = "invoice.pdf") -> FilePayload:
    """A PDF with one of `SENTENCES` on each page, as Playwright takes files."""
    target = io.BytesIO()
    canvas = Canvas(target, pagesize=A5)
    for sentence in SENTENCES:
        canvas.setFont("Helvetica", 14)
        canvas.drawString(40, 500, sentence)
        canvas.showPage()
    canvas.save()
    return {"name": name, "mimeType": "application/pdf", "buffer": target.getvalue()}
