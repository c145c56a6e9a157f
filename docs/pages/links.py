"""Links of the pages, which lead to files of the checkout: where they lead on the site.

The pages are also read as they lie in the repository, so their links are paths of it.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
CODE = {".py": "python", ".toml": "toml", ".sh": "sh"}
# Pages that lie outside of docs/, and what they are called on the site.
COPIED = {
    "CHANGELOG.md": "_made/changelog.md",
    "CONTRIBUTING.md": "_made/contributing.md",
    "conformance/README.md": "_made/conformance.md",
    "examples/README.md": "_made/examples.md",
}
# The table of other projects on the vectors, which the site shows as a page.
MATRIX = "conformance/matrix.csv"


def on_the_site(target: str) -> str | None:
    """Returns the page or file of the site that shows a path of the repository.

    Args:
        target: the path, relative to the root of the repository.

    Returns:
        A path in docs/, or None if there is no such file.
    """
    path = ROOT / target
    if target == "README.md":
        return "index.md"
    if target in COPIED:
        return COPIED[target]
    if target == MATRIX:
        return "_made/matrix.md"
    if path.is_dir():
        return f"_made/files/{target}.md"
    if not path.exists():
        return None
    if path.suffix in CODE:
        return f"_made/files/{target}.md"
    return os.path.relpath(path, DOCS)


def outside(text: str, page: str) -> set[str]:
    """Returns paths that a page links to, and that need a page made for them."""
    paths = set()
    for _, _, target, _ in links(text):
        path = resolved(target, page)
        site_path = path and on_the_site(path)
        if path and site_path == f"_made/files/{path}.md":
            paths.add(path)
    return paths


def links(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Yields the links outside of code: "!" for a picture, words, path, anchor."""
    for number, piece in enumerate(FENCE.split(text)):
        if number % 2 == 0:
            for match in LINK.finditer(piece):
                picture, words, target, anchor = match.groups("")
                yield picture, words, target, anchor


def rewritten(text: str, page: str) -> str:
    """Returns a page's text with links that lead to where things are on the site.

    Args:
        text: in Markdown.
        page: the path of the page, relative to the root of the repository.
    """
    pieces = FENCE.split(text)
    pieces[::2] = [LINK.sub(replacement(page), piece) for piece in pieces[::2]]
    return "".join(pieces)


def replacement(page: str) -> Callable[[re.Match], str]:
    """Returns what replaces a link of a page."""

    def replaced(match: re.Match) -> str:
        picture, words, target, anchor = match.groups("")
        path = resolved(target, page)
        if path is None:
            return match[0]
        site_path = on_the_site(path)
        # tests/docs/test_docs.py fails on such a link; the site is built without it.
        return f"{picture}[{words}](/{site_path}{anchor})" if site_path else words

    return replaced


def resolved(target: str, page: str) -> str | None:
    """Returns the path in the repository that a link means, or None for others."""
    if not target or re.match(r"[a-z]+:|/", target):
        return None
    joined = os.path.normpath(PurePosixPath(page).parent / target)
    return None if joined.startswith("..") else joined
