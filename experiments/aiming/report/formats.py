"""The formats of a report: text for a terminal, a Markdown file, an HTML page."""

from markupsafe import Markup
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid

from experiments.aiming.report.content import Page, Program, Section, Table
from experiments.study.report.styles import CSS, templates

DETAILED = 3  # most programs of a target for which a terminal shows all details
WIDE = 10_000  # characters per line in a file or a pipe: nothing is wrapped


def text(page: Page) -> str:
    """Returns the text for a terminal, wrapped to its width."""
    console = Console(markup=False, emoji=False, highlight=False, color_system=None)
    if not console.is_terminal:
        console.width = WIDE
    with console.capture() as captured:
        for number, section in enumerate(page.sections):
            _print_section(console, section, is_first=not number)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _print_section(console: Console, section: Section, is_first: bool) -> None:
    def lines(*shown: str, indent: int = 2) -> None:
        for line in shown:
            console.print(Padding(line or " ", (0, 0, 0, indent), expand=False))

    def grid(table: Table, indent: int = 2) -> None:
        shown = Grid(*table.heads, box=None, pad_edge=False, padding=(0, 2, 0, 0))
        shown.columns[0].no_wrap = True
        for row in table.rows:
            shown.add_row(*row)
        console.print(Padding(shown, (0, 0, 0, indent), expand=False))

    lines(*([] if is_first else [""]), section.head, indent=0)
    for table in section.tables:
        lines("", table.title)
        grid(table)
    asked = [x for x in section.programs if x.is_asked]
    detailed = asked if len(asked) <= DETAILED else []
    for program in detailed:
        lines("", program.label)
        lines(*program.lines, indent=4)
        if program.traffic.rows:
            grid(program.traffic, 4)
    reasons = _reasons([x for x in section.programs if x not in detailed])
    lines(*["", *reasons] if reasons else [], "", *section.notes)


def _reasons(programs: list[Program]) -> list[str]:
    return [f"{x.label}: {x.reason}" for x in programs if x.reason]


def markdown(page: Page) -> str:
    """Returns Markdown, to be put into a page of documentation."""
    parts = [f"```sh\n{page.command}\n```", *page.versions]
    for section in page.sections:
        parts.append(f"## {section.head}")
        for table in section.tables:
            lines = [table.heads, ["---"] * len(table.heads), *table.rows]
            grid = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
            parts += [f"**{table.title}**", grid]
        for lines in (_reasons(section.programs), section.notes):
            parts += ["\n".join(f"- {line}" for line in lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def html(page: Page) -> str:
    """Returns a single HTML file that needs no other file."""
    return templates().get_template("aim.html.j2").render(page=page, css=Markup(CSS))
