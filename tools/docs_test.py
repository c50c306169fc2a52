"""Look at the built documentation in a headless Chromium: errors, broken links, layout, dark mode, and the search.

    python tools/docs_test.py docs/_build/html [--pages tutorials/*] [--pictures FOLDER]

Chromium is that of the system, or the program that the environment variable CHROMIUM names.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import sys
import threading
from fnmatch import fnmatch
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from playwright.sync_api import Browser, Page, sync_playwright

FAULTS = Path(__file__).with_name("docs_browser.js").read_text(encoding="utf-8")
SETTLED = "() => Promise.all(document.getAnimations().map((change) => change.finished.catch(() => null)))"
VIEWS = ((1400, "light"), (1400, "dark"), (420, "light"))
# What readers type, and the page that answers.
QUESTIONS = {
    "trainer": "tutorials/trainer",
    "kv cache": "tutorials/generation",
    "cu_seqlens": "tutorials/packed_documents",
    "selected blocks": "tutorials/selected_blocks",
    "why slow": "slow",
    "neighborhood images": "tutorials/images",
    "score_mod": "tutorials/from_flex_attention",
    "dropout": "dropout",
    "jax": "tutorials/jax",
    "threads": "threads",
    "same bits": "guarantees",
    "alibi": "scores",
    "splat": "systems/splat",
    "megatron": "systems/tensor_parallel",
}


class Quiet(SimpleHTTPRequestHandler):
    """A server that logs nothing."""

    def copyfile(self, source: BinaryIO, outputfile: BinaryIO) -> None:
        """Send a file; the browser may leave the page before it has all of it."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            super().copyfile(source, outputfile)

    def log_message(self, *args: object) -> None:
        """Print nothing."""


class Links(HTMLParser):
    """The addresses and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note ``href``, ``src`` and ``id``."""
        for key, value in attributes:
            if key == "id" and value:
                self.anchors.add(value)
            elif value and (key == "src" or key == "href" and tag != "link"):
                self.addresses.append(value)


def broken_links(root: Path) -> list[str]:
    """Addresses within the site without a file or an anchor."""
    root = root.resolve()
    files = (page for page in root.rglob("*.html") if "_static" not in page.parts)  # of the theme: templates
    pages = {page: Links(page.read_text(encoding="utf-8")) for page in files}
    found = []
    for page, links in pages.items():
        for address in links.addresses:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchor = unquote(parts.fragment)
            missing = anchor and target in pages and anchor not in pages[target].anchors
            # Pages of source code link the name under which the code is defined, others that under which it is public.
            if not target.exists() or (missing and "_modules" not in page.parts):
                found.append(f"{page.relative_to(root)}: {address} leads nowhere")
    return found


def look(browser: Browser, address: str, names: list[str], pictures: Path | None) -> list[str]:
    """Faults of pages: what the console says, requests that fail, and what docs_browser.js finds at each width."""
    found: list[str] = []
    context = browser.new_context()
    page = context.new_page()
    here = ""
    page.on("pageerror", lambda error: found.append(f"{here}: {error}"))
    page.on("console", lambda said: said.type in ("error", "warning") and found.append(f"{here}: console: {said.text}"))
    page.on("requestfailed", lambda request: found.append(f"{here}: {request.url} was not loaded"))
    context.route(lambda url: not url.startswith(address), lambda route: route.abort())  # as without a network
    for here in names:
        page.goto(f"{address}/{here}.html")
        for width, theme in VIEWS:
            page.set_viewport_size({"width": width, "height": 900})
            page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
            page.evaluate(SETTLED)
            found += [f"{here} at {width}, {theme}: {fault}" for fault in page.evaluate(FAULTS)]
            if pictures:
                page.screenshot(path=pictures / f"{here.replace('/', '_')}-{width}-{theme}.png", full_page=True)
    context.close()
    return found


def search(page: Page, address: str) -> list[str]:
    """Questions whose page is not among the first three hits."""
    found = []
    for question, answer in QUESTIONS.items():
        page.goto(f"{address}/search.html?q={question.replace(' ', '+')}")
        page.wait_for_function("document.querySelector('#search-results p, .search-summary')?.textContent.match(/\\d/)")
        hits = page.eval_on_selector_all("ul.search li > a", "links => links.slice(0, 3).map(a => a.pathname)")
        if f"/{answer}.html" not in hits:
            found.append(f"search {question!r}: expected {answer} among the first three hits, got {hits}")
    return found


def chromium() -> str:
    """The browser's path; SystemExit if there is none."""
    names = [os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    path = next(filter(None, map(shutil.which, filter(None, names))), None)
    return path or sys.exit("docs_test: no Chromium; run apt-get install chromium as root, or set CHROMIUM")


def main() -> None:
    """Print the faults; exit with 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--pages", default="*", help="pages to look at, by a pattern of their names")
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each page at each width")
    options = parser.parse_args()
    handler = functools.partial(Quiet, directory=str(options.root))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    files = sorted(options.root.rglob("*.html"))
    names = [file.relative_to(options.root).with_suffix("").as_posix() for file in files]
    names = [name for name in names if name[0] != "_" and fnmatch(name, options.pages)]
    found = broken_links(options.root)
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        found += look(browser, address, names, options.pictures)
        found += search(browser.new_page(), address)
        browser.close()
    print("\n".join(found) or f"docs_test: {len(names)} pages and {len(QUESTIONS)} questions without faults")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
