"""Runs the notebooks, docs/notebooks/*.ipynb, and writes them with their outputs.

    python -m pages.notebooks [NAME …]    NAME is that of a file without its ending

`make notebooks` does it. GitHub, Colab and the site show these files as they are.
"""

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from pages.links import ROOT

FOLDER = ROOT / "docs" / "notebooks"
REPOSITORY = "https://github.com/syncalgos/syncalgos/blob/main"
COLAB = "https://colab.research.google.com"
LINK = re.compile(r"\]\(([^)\s]+)\)")
VERSION = 4  # of the format
TIMEOUT = 900  # seconds for a cell
CODE_HASH = "code_sha256"  # in the metadata: of the code that made the outputs


def find_notebooks() -> list[Path]:
    """Returns the files of the notebooks."""
    return sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> NotebookNode:
    """Returns a notebook."""
    return nbformat.read(path, VERSION)


def find_code(notebook: NotebookNode) -> list[NotebookNode]:
    """Returns the cells of code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def hash_code(notebook: NotebookNode) -> str:
    """Returns a hash of all code of a notebook."""
    code = "\n\n".join(cell.source for cell in find_code(notebook))
    return hashlib.sha256(code.encode()).hexdigest()


def make_badge(name: str) -> str:
    """Returns the picture that opens a notebook in Colab."""
    address = f"{REPOSITORY}/docs/notebooks/{name}.ipynb"
    page = address.replace("https://github.com", f"{COLAB}/github")
    return f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({page})"


def find_links(notebook: NotebookNode) -> Iterator[str]:
    """Yields the files of the repository that the text of a notebook leads to.

    Links are whole addresses, as a notebook is also read in Colab.
    """
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for target in LINK.findall(cell.source):
                if not target.startswith("https://"):
                    raise ValueError(f"{target}: give it as {REPOSITORY}/…")
                if target.startswith(REPOSITORY):
                    path, _, _ = target.removeprefix(f"{REPOSITORY}/").partition("#")
                    yield path


def execute(notebook: NotebookNode) -> None:
    """Runs the cells of a notebook in its folder, by the kernel of docs/kernels.

    What it holds afterwards says nothing of the machine, nor of the time.
    """
    from nbclient import NotebookClient  # of the extra docs alone

    NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {key: x for key, x in cell.metadata.items() if key == "tags"}
    for cell in find_code(notebook):
        cell.outputs = merge_streams(cell.outputs)
    notebook.metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
        CODE_HASH: hash_code(notebook),
    }


def merge_streams(outputs: Iterable[NotebookNode]) -> list[NotebookNode]:
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
    for path in find_notebooks():
        if not names or path.stem in names:
            notebook = read(path)
            execute(notebook)
            nbformat.write(notebook, path)
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
