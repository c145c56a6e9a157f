"""Pages of the algorithms: one for each of the registry, and the list of all."""

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path

import syncalgos
from experiments.command.terminal import format_bytes
from pages import atlas, papers, published, traffic
from pages.docstrings import Docstring, is_formula, literal, parsed, to_markdown
from pages.signatures import definition, parameters

DOCS = Path(__file__).parents[1]
PICTURES = "trajectories"
FAMILIES = (
    "Gradients at every step",
    "Averages of models",
    "Outer momentum",
    "Late arrivals",
    "Against drift",
    "Peers instead of all",
    "Little at a time",
    "Compressed gradients",
)


def pages(made_folder: Path) -> dict[str, str]:
    """Returns the text of each page, by its path in the folder of made pages.

    Args:
        made_folder: it; a picture in it at trajectories/NAME.svg gets its place.
    """
    counts = traffic.count_all()
    tables = atlas.read_all(DOCS / "studies")
    names_by_family = group_by_family()
    texts = {"algorithms/index.md": list_algorithms(names_by_family, counts)}
    for family, names in names_by_family.items():
        texts[f"algorithms/{slug(family)}.md"] = group(family, names, counts)
    for name in syncalgos.ALGORITHMS:
        picture = made_folder / PICTURES / f"{name}.svg"
        texts[f"algorithms/{name}.md"] = algorithm_page(
            name, counts, tables, picture.exists()
        )
    return texts


def group_by_family() -> dict[str, list[str]]:
    """Returns the names of the registry by the family that their docstring says.

    Raises:
        ValueError: a docstring has no family, or one that is not in FAMILIES.
    """
    names_by_family: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for name, factory in syncalgos.ALGORITHMS.items():
        family = parsed(factory).family
        if family not in names_by_family:
            raise ValueError(
                f"{name}: end the docstring with the line `Family: X.`, where X is one "
                f"of {', '.join(FAMILIES)}, not {family!r}"
            )
        names_by_family[family].append(name)
    return names_by_family


def algorithm_page(
    name: str,
    counts: dict[str, traffic.Traffic],
    tables: atlas.Tables,
    has_picture: bool,
) -> str:
    """Returns the page of one algorithm."""
    make = syncalgos.ALGORITHMS[name]
    doc = parsed(make)
    parts = [
        f"# {name}",
        to_markdown(doc.summary),
        picture(name) if has_picture else "",
        "## The update",
        update(doc),
        *[to_markdown(note) for note in doc.notes],
        f"**Source.** {to_markdown(doc.source)}",
        papers.folded(doc.source),
        published.differences_list(name),
        "## Parameters",
        signature(name, make, doc),
        f"**Returns.** {to_markdown(doc.returns)}",
        f"**Raises.** {to_markdown(doc.raises)}",
        published.defaults_table(name),
        "## What it sends",
        sending(name, counts),
        "## In the atlas",
        atlas_rows(name, tables),
        "## Try it",
        f"```pycon\n{doc.example}\n```",
        f"On the command line:\n\n```sh\n{run_command(name)}\n```",
        "## The code",
        code(make),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def picture(name: str) -> str:
    """Returns the place of the animated picture."""
    about = f"The paths of the workers' models and of the center with {name}"
    address = f"/_made/{PICTURES}/{name}.svg"
    image = f"```{{image}} {address}\n:alt: {about}\n:class: trajectory\n```"
    return f"{image}\n\n{{download}}`The animation as SVG <{address}>`"


def update(doc: Docstring) -> str:
    """Returns the update, its formulas as the docstring has them."""
    parts = []
    for paragraph in doc.update:
        if is_formula(paragraph):
            parts.append(literal(paragraph))
        else:
            parts.append(to_markdown(paragraph))
    return "\n\n".join(parts)


def signature(name: str, make: Callable, doc: Docstring) -> str:
    """Returns the signature, and each parameter with its type and default."""
    signature_parameters = parameters(make)
    short = ", ".join(str(x._replace(kind="")) for x in signature_parameters)
    entries = [f"```{{py:function}} syncalgos.{name}({short})\n```"]
    for parameter in signature_parameters:
        if parameter.name == "*":
            continue
        default = "required" if parameter.required else f"default `{parameter.default}`"
        entries.append(
            f"`{parameter.name}`: `{parameter.kind}`, {default}\n"
            f": {to_markdown(doc.parameters[parameter.name])}"
        )
    return "\n\n".join(entries)


def sending(name: str, counts: dict[str, traffic.Traffic]) -> str:
    """Returns the bytes of a step, beside those of synchronous SGD."""
    all_steps = counts[atlas.BASELINE].most_bytes
    rate_note = f" and a learning rate of {traffic.LEARNING_RATE}"
    rate = rate_note if traffic.needs_rate(syncalgos.ALGORITHMS[name]) else ""
    setting = (
        f"A model of {traffic.PARAMS:,} float32 params has "
        f"{format_bytes(4 * traffic.PARAMS)}. With {traffic.WORKERS} workers and the "
        f"defaults{rate}, over {traffic.STEPS:,} steps,"
    )
    if name == atlas.BASELINE:
        return f"{setting} each worker sends **{format_bytes(all_steps)}** per step."
    least_bytes, most_bytes = counts[name]
    if least_bytes != most_bytes:
        return (
            f"{setting} each worker sends on average **{format_bytes(least_bytes)}** "
            f"per step if no vote asks for an average, and "
            f"**{format_bytes(most_bytes)}** if each does. `{atlas.BASELINE}` sends "
            f"{format_bytes(all_steps)}."
        )
    return (
        f"{setting} each worker sends on average **{format_bytes(most_bytes)}** "
        f"per step: {ratio(most_bytes / all_steps)} `{atlas.BASELINE}`, which sends "
        f"{format_bytes(all_steps)}."
    )


def ratio(share: float) -> str:
    """Returns a share of bytes in words."""
    if 0.95 < share < 1.05:
        return "as much as"
    if share > 1:
        return f"{share:.3g} times as much as"
    return f"1/{1 / share:.3g} of" if share < 0.67 else f"{share:.2f} times"


def atlas_rows(name: str, tables: atlas.Tables) -> str:
    """Returns the rows of the atlas, and what they mean."""
    rows = atlas.algorithm_tables(name, tables)
    if not rows:
        return "The atlas has no row for this algorithm yet."
    return (
        "Every algorithm has the same number of trials, over its learning rate and one "
        "parameter of its own. The table shows the mean ± standard deviation of 25 "
        f"seeds, and the 95 % interval of the difference from `{atlas.BASELINE}` "
        "([the atlas](/studies/atlas.md)).\n\n" + rows
    )


def run_command(name: str) -> str:
    """Returns the command line of a run."""
    return f"python -m experiments.run --algo {name}"


def code(make: Callable) -> str:
    """Returns the function without its docstring."""
    tree = definition(make)
    lines = inspect.getsource(make).splitlines()
    docstring = tree.body[0]
    code_lines = lines[: docstring.lineno - 1] + lines[docstring.end_lineno :]
    path = Path(inspect.getsourcefile(inspect.unwrap(make)) or "").relative_to(
        DOCS.parent
    )
    return (
        f"`{path}`, without its docstring:\n\n```python\n"
        + "\n".join(code_lines).rstrip()
        + "\n```"
    )


def list_algorithms(
    names_by_family: dict[str, list[str]], counts: dict[str, traffic.Traffic]
) -> str:
    """Returns the list of all algorithms."""
    model = format_bytes(4 * traffic.PARAMS)
    parts = [
        f"# The {len(syncalgos.ALGORITHMS)} algorithms",
        "Each algorithm has a page with its update, its parameters, what it sends, "
        "how it scored in the atlas, and its code. [Which algorithm for "
        "me?](/choosing.md) helps to choose one. [The table](/algorithms.md) shows "
        "all updates side by side.",
        f"The second column is what each of {traffic.WORKERS} workers sends per step, "
        f"on average, for a model of {model} and with the defaults.",
    ]
    for family, names in names_by_family.items():
        parts.append(f"## {family}\n\n{family_table(names, counts)}")
    return "\n\n".join([*parts, toctree(map(slug, FAMILIES))])


def group(family: str, names: list[str], counts: dict[str, traffic.Traffic]) -> str:
    """Returns the page of a family, below which the menu has its algorithms."""
    head = f"# {family}\n\n[All algorithms](index.md)"
    return "\n\n".join([head, family_table(names, counts), toctree(sorted(names))])


def family_table(names: list[str], counts: dict[str, traffic.Traffic]) -> str:
    """Returns the table of a family."""
    lines = ["| algorithm | per step | in one line |", "|---|---|---|"]
    for name in names:
        summary = to_markdown(parsed(syncalgos.ALGORITHMS[name]).summary)
        lines.append(
            f"| [{name}]({name}.md) | {format_bytes(counts[name].most_bytes)} | "
            f"{summary.replace('|', '&#124;')} |"
        )
    return "\n".join(lines)


def slug(family: str) -> str:
    """Returns the name of a family's page."""
    return family.lower().replace(" ", "-")


def toctree(pages: Iterable[str]) -> str:
    """Returns a hidden table of contents."""
    return "```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"
