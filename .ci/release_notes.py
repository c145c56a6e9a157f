"""Prints a version's section of the changelog, if its tag names the package's version.

    python .ci/release_notes.py v1.2.3

The release workflow shows this text. Ends with 1 and one line where the tag is not the
version of syncalgos/__init__.py, or the changelog has no text for it.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version(root: Path) -> str:
    """The version that the package states, read without an import of jax."""
    text = (root / "syncalgos" / "__init__.py").read_text("utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if not found:
        raise SystemExit("syncalgos/__init__.py has no __version__")
    return found[1]


def notes(root: Path, tag: str) -> str:
    """The text below the heading `## VERSION` of CHANGELOG.md, up to the next one."""
    wanted = version(root)
    if tag != f"v{wanted}":
        raise SystemExit(f"the tag is {tag}, but the package's version is {wanted}")
    text = (root / "CHANGELOG.md").read_text("utf-8")
    heading = rf"^## \[?{re.escape(wanted)}\]?(?: [^\n]*)?$\n(.*?)(?=^## |\Z)"
    found = re.search(heading, text, re.MULTILINE | re.DOTALL)
    if not found or not found[1].strip():
        raise SystemExit(f"CHANGELOG.md has no text below a heading '## {wanted}'")
    return found[1].strip()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python .ci/release_notes.py TAG")
    print(notes(ROOT, sys.argv[1]))
