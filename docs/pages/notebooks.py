"""Runs the notebooks and writes them with their outputs: docs/notebooks/*.ipynb.

    python -m pages.notebooks [NAME …]    NAME is that of a file without its ending

`make notebooks` does it. A notebook is written as text, docs/notebooks/NAME.md. The
file with outputs is what GitHub, Colab and the site show.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import jupytext
from nbformat import NotebookNode

from pages.links import ROOT, resolved

FOLDER = ROOT / "docs" / "notebooks"
REPOSITORY = "https://github.com/syncalgos/syncalgos/blob/main"
COLAB = "https://colab.research.google.com"
LINK = re.compile(r"(?<=\]\()([^)\s#:]+\.md)")
TIMEOUT = 900  # seconds for a cell


def find_sources() -> list[Path]:
    """Returns the notebooks as text."""
    return sorted(FOLDER.glob("*.md"))


def read_source(source: Path) -> NotebookNode:
    """Returns a notebook without outputs, with its badge and links that lead anywhere.

    Its cells are numbered, so that a notebook that did not change is the same file.
    """
    notebook = jupytext.read(source, fmt="md:myst")
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        if cell.cell_type == "markdown":
            cell.source = replace_links(cell.source, source)
    title = notebook.cells[0]
    heading, _, text = title.source.partition("\n")
    title.source = f"{heading}\n\n{make_badge(source.stem)}\n{text}"
    del notebook.metadata["jupytext"]
    return notebook


def make_badge(name: str) -> str:
    """Returns the picture that opens a notebook in Colab."""
    address = f"{REPOSITORY}/docs/notebooks/{name}.ipynb"
    page = address.replace("https://github.com", f"{COLAB}/github")
    return f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({page})"


def replace_links(text: str, source: Path) -> str:
    """Returns a text whose links to pages lead to the repository."""

    def replace(match: re.Match) -> str:
        path = resolved(match[1], str(source.relative_to(ROOT)))
        if path and (ROOT / path).parent == FOLDER:
            path = path.removesuffix(".md") + ".ipynb"
        return f"{REPOSITORY}/{path}"

    return LINK.sub(replace, text)


def execute(notebook: NotebookNode) -> None:
    """Runs the cells of a notebook in its folder, by the kernel of docs/kernels."""
    from nbclient import NotebookClient  # of the extra docs alone

    NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = merge_streams(cell.outputs)


def merge_streams(outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    """Returns outputs in which what a cell prints is one text, without progress."""
    merged: list[NotebookNode] = []
    for output in outputs:
        is_text = output.output_type == "stream"
        if is_text and output.name == "stderr":
            continue
        if is_text and merged and merged[-1].output_type == "stream":
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def show_on_site(text: str, name: str) -> str:
    """Returns a notebook, as JSON, with links to pages of the site and without a badge.

    Args:
        text: the content of the file.
        name: the name of the file, without its ending.
    """
    badge = make_badge(name)
    page = badge[badge.rindex("(") + 1 : -1]
    download = f"{{download}}`download it <{name}.ipynb>`"
    text = text.replace(badge, f"[Open this notebook in Colab]({page}), or {download}.")
    return text.replace(f"]({REPOSITORY}/docs/", "](../")


def main(names: Sequence[str]) -> None:
    os.environ["JUPYTER_PATH"] = str(ROOT / "docs")
    os.environ["PYTHONPATH"] = str(ROOT)
    for source in find_sources():
        if not names or source.stem in names:
            notebook = read_source(source)
            execute(notebook)
            target = source.with_suffix(".ipynb")
            jupytext.write(notebook, target, fmt="ipynb")
            print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
