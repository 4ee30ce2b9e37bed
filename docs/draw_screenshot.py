"""Draw figures/page_light.webp and figures/page_dark.webp: the server's page with a sample image, in chromium.

    python docs/draw_screenshot.py

Needs chromium, and playwright from the extra dev. The page shows the sample images, whose authors and licences
progresvit/samples/CREDITS.md names.
"""

from __future__ import annotations

import io
import shutil
import socket
import sys
import threading
import time
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from PIL import Image
from playwright.sync_api import sync_playwright

from progresvit import api
from progresvit.data.samples import samples_folder
from progresvit.serving.page.router import page_router

FIGURES = Path(__file__).parent / "figures"
SAMPLE = "goldfish.jpg"
SIZE = {"width": 1280, "height": 860}
SCALE = 1.5
"""Pixels of the screenshot per pixel of the page."""
MOST_BYTES = 150_000


def main() -> None:
    """From the command line."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("chromium is not installed.")
    model, folder = api.load_with_folder()
    app = FastAPI()
    app.include_router(page_router(api.as_progresvit(model, "the page"), name=api.DEFAULT_MODEL, folder=folder))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=SIZE, device_scale_factor=SCALE, color_scheme=scheme)
            page.goto(f"http://127.0.0.1:{listening.getsockname()[1]}/")
            page.set_input_files("#file", samples_folder() / SAMPLE)
            page.wait_for_selector(f".round:nth-child({len(model.config.rounds)}) .view:not([hidden])")
            page.evaluate("document.activeElement.blur()")
            page.wait_for_timeout(500)  # the bars grow
            save(page.screenshot(full_page=True), FIGURES / f"page_{scheme}.webp")
        browser.close()
    server.should_exit = True
    thread.join()


def save(screenshot: bytes, path: Path) -> None:
    """Write a screenshot as WebP of the best quality that fits into ``MOST_BYTES``."""
    for quality in range(90, 40, -10):
        buffer = io.BytesIO()
        Image.open(io.BytesIO(screenshot)).convert("RGB").save(buffer, "WEBP", quality=quality, method=6)
        if buffer.tell() <= MOST_BYTES:
            break
    path.write_bytes(buffer.getvalue())
    print(f"wrote {path}: {buffer.tell():,} bytes")


if __name__ == "__main__":
    main()
