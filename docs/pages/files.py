"""Pages of files outside of docs/: those that pages link to, and whole documents."""

from pathlib import Path

from pages import matrix
from pages.links import (
    CODE,
    COPIED,
    DOCS,
    MATRIX,
    ROOT,
    on_the_site,
    outside,
    rewritten,
)

PRESETS = "experiments/study/presets/"
TITLES = {
    "experiments/study/presets": "The presets of studies",
    "docs/records": "Records of measurements",
    "docs/records/wire": "Bytes of compiled programs, step by step",
}


def pages() -> dict[str, str]:
    """Returns the text of each page, by its path in the folder of made pages."""
    texts = {
        file_page.removeprefix("_made/"): rewritten((ROOT / path).read_text(), path)
        for path, file_page in COPIED.items()
        if file_page.startswith("_made/")
    }
    matrix_page = matrix.page()
    texts["matrix.md"] = rewritten(matrix_page, MATRIX)
    examples = [
        f"files/examples/{x.stem}.py" for x in sorted(ROOT.glob("examples/*.py"))
    ]
    texts["examples.md"] += toctree(examples)
    needed = {f"examples/{Path(x).name}" for x in examples}
    needed |= outside(matrix_page, MATRIX)
    for page in [*sources(), *COPIED]:
        needed |= outside((ROOT / page).read_text(), page)
    for folder in [ROOT / path for path in needed if (ROOT / path).is_dir()]:
        needed |= {str(x.relative_to(ROOT)) for x in inside(folder) if x.suffix in CODE}
    for path in sorted(needed):
        texts[f"files/{path}.md"] = file_page(path)
    return texts


def inside(folder: Path) -> list[Path]:
    """Returns the files of a folder."""
    return sorted(x for x in folder.rglob("*") if x.is_file() and x.suffix != ".pyc")


def sources() -> list[str]:
    """Returns the paths of the pages of docs/, relative to the root."""
    pages = [*DOCS.glob("*.md"), *DOCS.glob("studies/*.md")]
    return sorted(str(page.relative_to(ROOT)) for page in pages)


def file_page(path: str) -> str:
    """Returns the page of a file, or of a folder."""
    file = ROOT / path
    body = listing(file) if file.is_dir() else listed_code(file)
    orphan = "" if path.startswith("examples/") else "---\norphan: true\n---\n\n"
    return f"{orphan}# {make_title(path)}\n\n{body}\n"


def make_title(path: str) -> str:
    """Returns the title of the page of a file, or of a folder."""
    name = Path(path).stem
    if path.startswith(PRESETS) and path.endswith(".toml"):
        return f"The preset {name}"
    return TITLES.get(path, path)


def listed_code(file: Path) -> str:
    """Returns a file as a block of code."""
    return f"```{CODE[file.suffix]}\n{file.read_text().rstrip()}\n```"


def listing(folder: Path) -> str:
    """Returns the files of a folder as a list of pages and downloads."""
    return "\n".join(
        f"- [{file.relative_to(folder)}](/{on_the_site(str(file.relative_to(ROOT)))})"
        for file in inside(folder)
    )


def toctree(pages: list[str]) -> str:
    """Returns a hidden table of contents."""
    return "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"
