"""Walks through jaxprs without computing anything, by one table of what a call is."""

import functools
import sys
from collections.abc import Callable, Container, Iterator
from itertools import product
from typing import Any, NamedTuple

import jax
from jax.extend import core

# Collectives of jax: primitives that send along the axes that they name. Some are in
# two parts, of which the second waits.
_COLLECTIVES = "psum pmax pmin all_gather reduce_scatter all_to_all ragged_all_to_all "
_COLLECTIVES += "ppermute pbroadcast psend precv preduced vary_unreduced_cast"
_PREFIXES = "", "unreduced_"
_KINDS = "", "_invariant", "_reduced", "_dynamic", "_p"
_PHASES = "", "_start", "_done"
SENDS = set(map("".join, product(_PREFIXES, _COLLECTIVES.split(), _KINDS, _PHASES)))

# Primitives that name an axis, but send nothing along it.
SILENT = {"axis_index", "pvary"}


class Runs(NamedTuple):
    """The jaxprs that an equation runs.

    Attributes:
        arms: each jaxpr with the values of its inputs in the first pass.
        carry: the place of the operands that each pass but the first takes from the
            results of the pass before, which begin with them.
        passes: the number of passes; None if no jaxpr shows it.
    """

    arms: list[tuple[Any, list[Any]]]
    carry: slice = slice(0)
    passes: int | None = 1


_Runner = Callable[[Any, list[Any]], Runs]
"""(equation, a value for each of its operands) -> what the equation runs."""


def _run_call(equation: Any, values: list[Any]) -> Runs:
    return Runs([(inner(equation)[0], values)])


def _run_solver(equation: Any, values: list[Any]) -> Runs:
    jaxprs = equation.params["jaxprs"]
    consts = equation.params["const_lengths"]
    solve_start = consts.matvec + consts.vecmat
    solve_consts = values[solve_start : solve_start + consts.solve]
    return Runs([(jaxprs.solve, solve_consts + values[sum(consts) :])])


def _run_branches(equation: Any, values: list[Any]) -> Runs:
    return Runs([(x, values[1:]) for x in equation.params["branches"]])


def _run_scan(equation: Any, values: list[Any]) -> Runs:
    params = equation.params
    numbers = [params.get("num_consts"), params.get("num_carry")]
    if "ft_in" in params:  # since jax 0.11: constants, carry and rows
        numbers = [len([*part]) for part in params["ft_in"].unpack()]
    carry = slice(numbers[0], numbers[0] + numbers[1])
    return Runs([(params["jaxpr"], values)], carry, params["length"])


def _run_while(equation: Any, values: list[Any]) -> Runs:
    params = equation.params
    test_consts = params["cond_nconsts"]
    carry = slice(test_consts + params["body_nconsts"], None)
    test = params["cond_jaxpr"], values[:test_consts] + values[carry]
    body = params["body_jaxpr"], values[test_consts:]
    return Runs([test, body], carry, None)


# Primitives that run one jaxpr once. Its results are theirs.
_CALL_NAMES = "jit call closed_call remat2 composite custom_jvp_call custom_vjp_call"
CALLS: dict[str, _Runner] = {
    **dict.fromkeys(f"{_CALL_NAMES} call_hi_primitive".split(), _run_call),
    "custom_linear_solve": _run_solver,
}
# All primitives whose jaxprs are run in a known way.
RUNS: dict[str, _Runner] = {
    **CALLS,
    **dict.fromkeys(("custom_vmap_call", "shard_map"), _run_call),
    "cond": _run_branches,
    "scan": _run_scan,
    "while": _run_while,
}

# Jaxprs and functions of these combine single numbers, make keys, or return nothing;
# names begin so.
_ARITHMETIC = "reduce", "scatter", "select_and_scatter", "random_", "debug_"

# Primitives that may send what their jaxpr, if any, does not show: by a kernel, a rule
# for several lanes, or axes of its own.
_OPAQUE = {"ffi_call", "custom_vmap_call", "shard_map"}


def runs(equation: Any, values: list[Any]) -> Runs:
    """Returns what an equation runs, given a value for each of its operands.

    An equation has no arms if its primitive is not in RUNS.
    """
    return RUNS.get(equation.primitive.name, lambda *_: Runs([]))(equation, values)


def axes(equation: Any, mapped: Container[str] = ()) -> list[str]:
    """Returns the names of axes along which an equation may send, if any.

    Args:
        equation: the equation.
        mapped: names that tell of an axis in any parameter of an unknown primitive.
    """
    # jax writes `axes` for a psum and `axis_name` for other collectives; numbers there
    # are the axes of an array.
    if equation.primitive.name in SILENT:
        return []
    names = []
    for param, value in equation.params.items():
        for x in jax.tree.leaves(value):
            if not isinstance(x, str):
                continue
            if param.startswith("ax") or (param != "name" and x in mapped):
                names.append(x)
    return names


def inner(equation: Any) -> list[Any]:
    """Returns the jaxprs in an equation's parameters, with their constants."""
    composite = equation.params.get("_prim")  # jnp.nonzero and others since jax 0.11
    if composite:
        return [jax.make_jaxpr(composite.expand)(*composite.in_avals)]
    return [x for x in _find_parts(equation) if _is_jaxpr(x)]


def hides(equation: Any) -> bool:
    """Whether an equation may run what no jaxpr in it shows: functions, kernels."""
    name = equation.primitive.name
    if name in RUNS or name.startswith(_ARITHMETIC):
        return name in _OPAQUE
    calls = [
        x for x in _find_parts(equation) if callable(x) and not isinstance(x, type)
    ]
    return name in _OPAQUE or bool(inner(equation) or calls)


@functools.cache  # asked for each equation
def is_of_jax(primitive: core.Primitive) -> bool:
    """Whether jax defines a primitive, so that its name says what it does.

    Another's may send by its rules for several lanes and for compilers, which no jaxpr
    shows.
    """
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] != "jax":
            continue
        if any(primitive is value for value in [*vars(module).values()]):
            return True
    return False


def within(equation: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields an equation and those of the jaxprs inside it, with their known passes."""
    yield equation, times
    passes = runs(equation, equation.invars).passes
    for jaxpr in inner(equation):
        yield from equations(jaxpr, times if passes is None else times * passes)


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields all equations of a jaxpr and of those inside it, as `within` does."""
    for equation in jaxpr.eqns:
        yield from within(equation, times)


def reads(jaxpr: Any, place: int) -> bool:
    """Whether a jaxpr uses or returns its input at a place."""
    variables = [*jaxpr.outvars]
    for equation in jaxpr.eqns:
        variables += equation.invars
    return any(variable is jaxpr.invars[place] for variable in variables)


def follow(
    jaxpr: Any,
    inputs: list[Any],
    visit: Callable[[Any, list[Any]], list[Any]],
    literals: bool = True,
) -> list[Any]:
    """Follows values of any kind through a jaxpr; returns those of its outputs.

    Args:
        jaxpr: the jaxpr, with or without its constants.
        inputs: a value for each input.
        visit: (equation, its operands' values) -> a value for each of its results.
        literals: whether numbers and constants in the jaxpr are values, or None.
    """
    consts = getattr(jaxpr, "consts", ()) if literals else ()
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=False))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, core.Literal):
            return atom.val if literals else None
        return values.get(atom)

    for equation in jaxpr.eqns:
        results = visit(equation, [*map(read, equation.invars)])
        values.update(zip(equation.outvars, results, strict=True))
    return [*map(read, jaxpr.outvars)]


def sends_inputs(jaxpr: Any, names: set[str]) -> bool:
    """Whether a jaxpr sends what depends on its inputs along one of some axes."""
    sending_equations: list[Any] = []

    def visit(equation: Any, values: list[Any]) -> list[Any]:
        if not any(values):
            return [None] * len(equation.outvars)
        if equation.primitive.name in CALLS:
            return follow(*runs(equation, values).arms[0], visit, literals=False)
        for part, _ in within(equation):
            if part.primitive.name in SENDS and names & {*axes(part)}:
                sending_equations.append(part)
        return [True] * len(equation.outvars)

    follow(jaxpr, [True] * len(jaxpr.jaxpr.invars), visit, literals=False)
    return bool(sending_equations)


def _find_parts(equation: Any) -> list[Any]:
    """Returns everything in an equation's parameters, out of tuples and the like."""
    return jax.tree.leaves([*equation.params.values()], is_leaf=_is_jaxpr)


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns")  # with constants or, in jax before 0.12, without
