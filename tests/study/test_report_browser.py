"""A report's page in a real browser, where one is installed."""

import shutil
import subprocess

import pytest
from support.sample_report import made_up

from experiments.study import page as pages

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
TIMEOUT = 120  # seconds, of what takes two

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser is installed: {', '.join(BROWSERS)}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of a report."""
    out = tmp_path_factory.mktemp("browser")
    pages.write_report(made_up(), out)
    return out


def browse(path, profile, *flags):
    """The document after its scripts, and what the browser logged."""
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu"]
    command += ["--enable-logging=stderr", "--v=0", f"--user-data-dir={profile}"]
    command += ["--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command += ["--virtual-time-budget=5000", *flags, "--dump-dom", path.as_uri()]
    run = subprocess.run(command, capture_output=True, timeout=TIMEOUT)
    assert run.returncode == 0
    return run.stdout.decode(), run.stderr.decode(errors="replace")


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
