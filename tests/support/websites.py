"""Sites as a reader meets them: their links, and their pages in a browser."""

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urldefrag, urlsplit

WIDTHS = (390, 1280)
THEMES = ("light", "dark")
KEPT_FOLDERS = ("_static", "_downloads")
DEPARTURES = ("a",)  # what a reader follows; all else is loaded with the page
# What is wrong with the page as it is shown now.
FLAWS = """
const found = [], root = document.documentElement;
if (root.scrollWidth > root.clientWidth) {
  const wide = [...document.querySelectorAll("main *")].filter(
    x => x.getBoundingClientRect().right > root.clientWidth + 1
      && !x.closest("pre, table, mjx-container, .pst-scrollable-table-container"));
  found.push("wider than the screen: " + wide.slice(0, 3).map(
    x => x.tagName + "." + x.className + " " + x.textContent.slice(0, 40)).join("; "));
}
// Words and numbers of a table are whole: letters of one stand on one line.
for (const cell of document.querySelectorAll("article :is(td, th)")) {
  const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  for (let text; (text = texts.nextNode());)
    for (const word of text.data.matchAll(/[\\w.,]+/g)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const tops = [...range.getClientRects()].map(x => Math.round(x.top));
      if (new Set(tops).size > 1) found.push("broken in a table: " + word[0]);
    }
}
for (const image of document.images)
  if (image.complete && !image.naturalWidth) found.push("no picture: " + image.src);
// Links stand out from what is behind them, also from the stripes of a table.
const channels = text => text.match(/[\\d.]+/g).map(Number);
const luminance = color => {
  const parts = color.slice(0, 3).map(x => x / 255).map(
    x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
};
const behind = node => {
  for (; node; node = node.parentElement) {
    const color = channels(getComputedStyle(node).backgroundColor);
    if (color.length < 4 || color[3] > 0.5) return color;
  }
  return [255, 255, 255];
};
const faint = new Set();
for (const link of document.querySelectorAll("article a")) {
  if (!link.textContent.trim() || link.matches(".headerlink, .btn")) continue;
  const text = link.querySelector("code") || link;
  const tones = [channels(getComputedStyle(text).color), behind(text)].map(luminance);
  const contrast = (Math.max(...tones) + 0.05) / (Math.min(...tones) + 0.05);
  if (contrast < 4.5) faint.add(contrast.toFixed(2) + " " + link.textContent);
}
if (faint.size) found.push("faint links: " + [...faint].slice(0, 3).join("; "));
for (const part of performance.getEntriesByType("resource"))
  if (!/^(data:|blob:)/.test(part.name) && !part.name.startsWith(location.origin))
    found.push("from elsewhere: " + part.name);
return found;
"""
# The bytes of a page and of all that it loads, uncompressed.
WEIGHT = """
const parts = performance.getEntriesByType("resource").map(x => x.decodedBodySize);
const text = document.documentElement.outerHTML;
return parts.reduce((sum, size) => sum + size, text.length);
"""
RESULTS = """
return [...document.querySelectorAll("#search-results li")].map(
  x => [x.querySelector("a").getAttribute("href"), x.innerText]);
"""


class Page(NamedTuple):
    """The anchors and the links of an HTML file; loaded parts count as links."""

    anchors: set[str]
    links: list[str]
    parts: list[str]


class Browser(NamedTuple):
    """A browser, and the address of the site that it shows."""

    driver: Any
    address: str


def pages(site: Path) -> list[str]:
    """Returns the paths of all pages of a site, without what it only keeps."""
    paths = (page.relative_to(site) for page in site.rglob("*.html"))
    return sorted(str(page) for page in paths if page.parts[0] not in KEPT_FOLDERS)


def read(file: Path) -> Page:
    """Reads the anchors and links of an HTML file."""
    page = Page(set(), [], [])

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            attributes = dict(attrs)
            page.anchors.update(
                attributes[x] for x in ("id", "name") if attributes.get(x)
            )
            target = attributes.get("href") or attributes.get("src")
            if target:
                (page.links if tag in DEPARTURES else page.parts).append(target)

    Reader().feed(file.read_text())
    return page


def broken(site: Path) -> list[str]:
    """Returns links that lead nowhere, and parts that lie elsewhere."""
    read_pages = {name: read(site / name) for name in pages(site)}
    broken_links = []
    for name, page in read_pages.items():
        broken_links += [f"{name} loads {x}" for x in page.parts if urlsplit(x).netloc]
        for target in {*page.links, *page.parts}:
            path, anchor = urldefrag(target)
            if urlsplit(path).scheme or urlsplit(path).netloc:
                continue
            file = (site / name).parent / unquote(
                urlsplit(path).path or Path(name).name
            )
            if not file.exists():
                broken_links.append(f"{name} -> {target}")
            elif anchor and file.suffix == ".html":
                target_page = read_pages.get(
                    str(file.resolve().relative_to(site.resolve()))
                )
                if target_page and unquote(anchor) not in target_page.anchors:
                    broken_links.append(f"{name} -> {target}")
    return broken_links


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serves a site on this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@contextmanager
def opened() -> Iterator[Any]:
    """Opens chromium without a window."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "WARNING"})
    service = Service(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


def resize(driver: Any, width: int) -> None:
    """Makes the page as wide as a device's screen."""
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)


def flaws(browser: Browser, page: str) -> list[str]:
    """Returns what is wrong with a page at any width and in any theme."""
    driver = browser.driver
    messages = []
    driver.get(browser.address + page)
    for width in WIDTHS:
        resize(driver, width)
        for theme in THEMES:
            driver.execute_script(f"document.documentElement.dataset.theme = '{theme}'")
            for flaw in driver.execute_script(FLAWS):
                messages.append(f"{page} at {width}, {theme}: {flaw}")
    # An error's line repeats for each width and theme: the log is read once.
    messages += [f"{page}: {line['message']}" for line in driver.get_log("browser")]
    return messages


def weigh(browser: Browser, page: str) -> int:
    """Returns the bytes of a page and of all that it loads."""
    browser.driver.get(browser.address + page)
    return browser.driver.execute_script(WEIGHT)


class Result(NamedTuple):
    """A result of the site's search: its page, and the text that is shown."""

    page: str
    text: str


def search(browser: Browser, words: str) -> list[Result]:
    """Returns what the site's search answers, best first, once it quotes the pages."""
    from selenium.webdriver.support.ui import WebDriverWait

    driver = browser.driver
    driver.get(f"{browser.address}search.html?q={quote(words)}")
    quoted = "return !!document.querySelector('#search-results li .context')"
    WebDriverWait(driver, 20).until(
        lambda browser_driver: browser_driver.execute_script(quoted)
    )
    results = driver.execute_script(RESULTS)
    return [Result(urlsplit(address).path, text) for address, text in results]
