"""A report's page in a real browser, where one is installed."""

import json
import re
import shutil
import subprocess
from functools import cache

import pytest
from reports import made_up

from experiments.study import page as pages

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
TIMEOUT = 120  # seconds, of what takes two

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser is installed: {', '.join(BROWSERS)}"
)

POLICY = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>")
# A frame, as no browser without a head opens a window of a phone's width.
FRAME = """<!DOCTYPE html><body style="margin: 0">
<iframe src="measured.html" style="border: 0; width: {}px; height: 900px"></iframe>
<pre id="told"></pre>
<script>
onmessage = event => document.getElementById("told").textContent = event.data;
</script>
"""
MEASURE = """<script>
onload = () => {
  const box = x => { const b = x.getBoundingClientRect(); return [b.width, b.height]; };
  const all = name => [...document.querySelectorAll(name)];
  document.querySelectorAll("details").forEach(x => x.open = true);
  const seen = x => box(x)[0] > 0;
  const parts = figure => ({
    boxes: [...figure.querySelectorAll("svg")].filter(seen).map(box),
    lines: [...figure.querySelectorAll("path")].filter(seen).length,
  });
  parent.postMessage(JSON.stringify({
    width: document.documentElement.clientWidth,
    scrolled: document.documentElement.scrollWidth,
    figures: all("figure").map(parts),
    cells: [...new Set(all("td").map(x => getComputedStyle(x).display))],
    heads: all("thead").map(box),
    words: all(".word").map(x => [x.textContent, box(x)[1]]),
    overflow: all("main *:not(.wide *):not(svg *)").filter(
      x => x.getBoundingClientRect().right > innerWidth + 1).map(x => x.outerHTML),
    paper: getComputedStyle(document.body).backgroundColor,
    ink: [...new Set(all("svg text").map(x => getComputedStyle(x).fill))].sort(),
    resources: performance.getEntriesByType("resource").map(x => x.name),
  }), "*");
};
</script></body>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of a report."""
    out = tmp_path_factory.mktemp("browser")
    pages.write(made_up(), out)
    return out


@pytest.fixture(scope="module")
def measured(folder, tmp_path_factory):
    """Takes the page's own measurements in a frame of a width, once for each."""

    @cache
    def measure(width, *flags):
        place = tmp_path_factory.mktemp("measured")
        text = POLICY.sub("", (folder / "report.html").read_text())
        assert text.count("</body>") == 1
        (place / "measured.html").write_text(text.replace("</body>", MEASURE))
        (place / "frame.html").write_text(FRAME.format(width))
        dom, log = browse(place / "frame.html", place / "profile", *flags)
        assert "CONSOLE" not in log
        (told,) = re.findall(r'<pre id="told">(.*?)</pre>', dom, re.S)
        return json.loads(told.replace("&lt;", "<").replace("&gt;", ">"))

    return measure


def browse(path, profile, *flags):
    """The document after its scripts, and what the browser logged."""
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu"]
    command += ["--enable-logging=stderr", "--v=0", f"--user-data-dir={profile}"]
    command += ["--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command += ["--virtual-time-budget=5000", *flags, "--dump-dom", path.as_uri()]
    run = subprocess.run(command, capture_output=True, timeout=TIMEOUT)
    assert run.returncode == 0
    return run.stdout.decode(), run.stderr.decode(errors="replace")


@pytest.mark.parametrize("width", [360, 1400])
def test_every_figure_is_there_and_nothing_is_wider_than_the_page(
    folder, measured, width
):
    told = measured(width)
    assert told["width"] == told["scrolled"] == width
    assert told["overflow"] == []
    assert len(told["figures"]) == len(list((folder / "figures").glob("*.svg")))
    for figure in told["figures"]:
        ((w, h),) = figure["boxes"]
        assert w > 250 and h > 100 and figure["lines"] > 4
        assert w > 0.8 * width or width > 360
    assert told["resources"] == []


@pytest.mark.parametrize(("width", "display"), [(360, "flex"), (1400, "table-cell")])
def test_a_table_is_cards_on_a_phone_and_no_name_is_broken(measured, width, display):
    told = measured(width)
    assert told["cells"] == [display]
    assert all((w <= 1) == (width == 360) for w, _ in told["heads"])
    assert {"sync_sgd", "--slow-momentum"} <= {word for word, _ in told["words"]}
    assert max(height for _, height in told["words"]) < 32  # one line


def test_the_page_breaks_no_rule_of_its_own_policy(folder, tmp_path):
    # Asking for a file, or running a script, would be an error in the log.
    dom, log = browse(folder / "report.html", tmp_path / "profile")
    assert "CONSOLE" not in log
    assert dom.count("<figure>") == len(list((folder / "figures").glob("*.svg")))


@pytest.mark.slow
def test_what_a_page_must_not_do_would_be_seen(folder, tmp_path):
    page = tmp_path / "page.html"
    text = (folder / "report.html").read_text()
    wrong = "<script>throw new Error('broken')</script><img src='http://localhost/x'>"
    page.write_text(text.replace("</body>", f"{wrong}</body>"))
    _, log = browse(page, tmp_path / "profile")
    lines = [x for x in log.splitlines() if "CONSOLE" in x]
    assert len([x for x in lines if "Content Security Policy" in x]) == 2


def test_dark_pages_have_light_text_in_their_figures(measured):
    light = measured(360)
    dark = measured(360, "--blink-settings=preferredColorScheme=0")
    assert light["paper"] == "rgb(255, 255, 255)"
    assert light["ink"] == ["rgb(28, 32, 36)", "rgb(89, 97, 109)"]
    assert dark["paper"] == "rgb(21, 24, 28)"
    assert dark["ink"] == ["rgb(164, 172, 184)", "rgb(232, 234, 237)"]
