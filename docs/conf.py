"""Settings of the documentation, and the pages that are made before it is built.

Made pages and pictures lie in docs/_made; `make docs` builds the site.
"""

import html
import inspect
import sys
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
MADE_PAGES = DOCS / "_made"
sys.path[:0] = [str(DOCS), str(ROOT)]

from pages import (  # noqa: E402
    algorithms,
    core,
    diffs,
    files,
    links,
    notebooks,
    prose,
    rst,
    search,
    signatures,
)
from pages.motion import trajectories  # noqa: E402

import syncalgos  # noqa: E402
from syncalgos.algorithms import ALGORITHMS  # noqa: E402

project = "syncalgos"
author = "the authors of syncalgos"
release = version = syncalgos.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
# Records and tables are files to download; notebooks are shown with their outputs.
exclude_patterns = [
    "_build",
    "pages",
    "records",
    "studies/*/*.md",
    "**/.ipynb_checkpoints",
]
default_role = "py:obj"
smartquotes = False  # quotes and dashes of code in prose are to be copied

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # `make notebooks` runs them

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 60

html_theme = "sphinx_book_theme"
html_title = f"syncalgos {version}"
html_favicon = html_logo = "static/icon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_extra_path = ["static/404.html"]
html_use_index = False  # the reference and the search are the index
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system
html_theme_options = {
    "logo": {"text": html_title},
    "home_page_in_toc": False,
    "show_navbar_depth": 1,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "repository_url": "https://github.com/syncalgos/syncalgos",
    "path_to_docs": "docs",
    "use_repository_button": True,
    "use_edit_page_button": True,
    "show_toc_level": 2,
    "navbar_persistent": [],  # the sidebar has the search
    "primary_sidebar_end": [],
    # Nothing is loaded from elsewhere: also no badge and no icon link.
    "icon_links": [],
}
# Pages that are folded below another in the sidebar.
CHILDREN = {
    "frameworks": "from-flax-and-optax own-loop process-group stacked-state orbax "
    "hyperparameters",
    "strategies": "adding-an-algorithm adding-a-part",
    "comparing": "trackers dask-cluster",
    "conformance": "_made/matrix _made/conformance",
    "studies": "studies/*",
    "aim": "gpt2",
}


def write_pictures() -> None:
    """Draws each algorithm's workers, unless its picture is newer than its file."""
    drawing = [*DOCS.glob("pages/motion/*.py")]
    folder = MADE_PAGES / algorithms.PICTURES

    def is_old(name: str) -> bool:
        code = [Path(inspect.getfile(ALGORITHMS[name])), *drawing]
        picture = folder / f"{name}.svg"
        changed = max(file.stat().st_mtime for file in code)
        return not picture.exists() or picture.stat().st_mtime < changed

    old_names = [*filter(is_old, ALGORITHMS)]
    if old_names:
        trajectories.main([*old_names, "--out", str(folder)])


def write_pages() -> None:
    """Writes made pages, those that have changed, and deletes others."""
    texts = algorithms.pages(MADE_PAGES) | files.pages()
    for path, page_text in texts.items():
        text = search.hide(page_text, f"_made/{path}")
        page = MADE_PAGES / path
        page.parent.mkdir(parents=True, exist_ok=True)
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
    for page in MADE_PAGES.rglob("*.md"):
        if str(page.relative_to(MADE_PAGES)) not in texts:
            page.unlink()


def read_source(app, docname: str, source: list[str]) -> None:
    """Leads links to where things are on the site, and lists a page's own pages."""
    if docname == "core":
        source[0] = core.filled(source[0])
    if docname == "from-flax-and-optax":
        source[0] = diffs.filled(source[0])
    if docname.startswith("notebooks/"):
        name = docname.removeprefix("notebooks/")
        source[0] = notebooks.show_on_site(source[0], name)
    elif not docname.startswith("_made/"):
        source[0] = links.rewritten(source[0], f"docs/{docname}.md")
    source[0] = search.add_entries(source[0], docname)
    if docname in CHILDREN:
        pages = CHILDREN[docname].replace(" ", "\n")
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{pages}\n```\n"


def read_docstring(app, kind, name, obj, options, lines: list[str]) -> None:
    """Marks what docstrings write as plain text."""
    lines[:] = rst.marked(lines)


def read_signature(app, kind, name, obj, options, signature, returned):
    """Shows parameters as the source has them."""
    return signatures.signature_text(obj) or signature, ""


def read_context(app, page: str, template: str, context: dict, doctree) -> None:
    """Describes a page in its head; made pages are without a button to their source."""
    if page.startswith("_made/"):
        context["page_source_suffix"] = ""
    has_description = 'name="description"' in context.get("metatags", "")
    if doctree is not None and not has_description:
        description = html.escape(prose.page_description(doctree))
        if description:
            context["metatags"] += f'<meta name="description" content="{description}">'


def setup(app) -> None:
    """Connects the above, and what needs Sphinx itself."""
    write_pictures()  # pages show those that are there
    write_pages()
    app.connect("source-read", read_source)
    app.connect("doctree-read", prose.finish)
    # Before napoleon, which turns sections into fields.
    app.connect("autodoc-process-docstring", read_docstring, priority=100)
    app.connect("autodoc-process-signature", read_signature)
    app.connect("html-page-context", read_context)
