"""Walks through jaxprs without computing anything, by one table of what a call is."""

import functools
import sys
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend import core

# Collectives of jax: primitives that send along the axes that they name. Some are in
# two parts, of which the second waits.
_SENT = "psum pmax pmin all_gather reduce_scatter all_to_all ragged_all_to_all "
_SENT += "ppermute pbroadcast psend precv preduced vary_unreduced_cast"
_KINDS = "", "_invariant", "_reduced", "_dynamic", "_p"
_NAMES = {x + y + z for x in ("", "unreduced_") for y in _SENT.split() for z in _KINDS}
SENDS = {name + part for name in _NAMES for part in ("", "_start", "_done")}

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


def _whole(equation: Any, values: list[Any]) -> Runs:
    return Runs([(inner(equation)[0], values)])


def _solver(equation: Any, values: list[Any]) -> Runs:
    jaxprs, consts = equation.params["jaxprs"], equation.params["const_lengths"]
    first = consts.matvec + consts.vecmat
    own = values[first : first + consts.solve]
    return Runs([(jaxprs.solve, own + values[sum(consts) :])])


def _one_of(equation: Any, values: list[Any]) -> Runs:
    return Runs([(x, values[1:]) for x in equation.params["branches"]])


def _scan(equation: Any, values: list[Any]) -> Runs:
    params = equation.params
    numbers = [params.get("num_consts"), params.get("num_carry")]
    if "ft_in" in params:  # since jax 0.11: constants, carry and rows
        numbers = [len([*part]) for part in params["ft_in"].unpack()]
    carry = slice(numbers[0], numbers[0] + numbers[1])
    return Runs([(params["jaxpr"], values)], carry, params["length"])


def _while(equation: Any, values: list[Any]) -> Runs:
    params, tested = equation.params, equation.params["cond_nconsts"]
    carry = slice(tested + params["body_nconsts"], None)
    test = params["cond_jaxpr"], values[:tested] + values[carry]
    return Runs([test, (params["body_jaxpr"], values[tested:])], carry, None)


# Primitives that run one jaxpr once. Its results are theirs.
_WHOLE = "jit call closed_call remat2 composite custom_jvp_call custom_vjp_call"
CALLS: dict[str, _Runner] = {
    **dict.fromkeys(f"{_WHOLE} call_hi_primitive".split(), _whole),
    "custom_linear_solve": _solver,
}
# All primitives whose jaxprs are run in a known way.
RUNS: dict[str, _Runner] = {
    **CALLS,
    **dict.fromkeys(("custom_vmap_call", "shard_map"), _whole),
    "cond": _one_of,
    "scan": _scan,
    "while": _while,
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
    values = [(k, x) for k, v in equation.params.items() for x in jax.tree.leaves(v)]
    texts = [(k, x) for k, x in values if isinstance(x, str)]
    return [x for k, x in texts if k.startswith("ax") or (x in mapped and k != "name")]


def inner(equation: Any) -> list[Any]:
    """Returns the jaxprs in an equation's parameters, with their constants."""
    if made := equation.params.get("_prim"):  # jnp.nonzero and others since jax 0.11
        return [jax.make_jaxpr(made.expand)(*made.in_avals)]
    return [x for x in _parts(equation) if _is_jaxpr(x)]


def hides(equation: Any) -> bool:
    """Whether an equation may run what no jaxpr in it shows: functions, kernels."""
    name = equation.primitive.name
    if name in RUNS or name.startswith(_ARITHMETIC):
        return name in _OPAQUE
    calls = [x for x in _parts(equation) if callable(x) and not isinstance(x, type)]
    return name in _OPAQUE or bool(inner(equation) or calls)


@functools.cache  # asked for each equation
def is_of_jax(primitive: core.Primitive) -> bool:
    """Whether jax defines a primitive, so that its name says what it does.

    Another's may send by its rules for several lanes and for compilers, which no jaxpr
    shows.
    """
    of_jax = [x for x in [*sys.modules] if x.partition(".")[0] == "jax"]
    return any(primitive is x for name in of_jax for x in _values(sys.modules[name]))


def _values(module: Any) -> list[Any]:
    return [*vars(module).values()]


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
    used = [v for e in jaxpr.eqns for v in e.invars]
    return any(v is jaxpr.invars[place] for v in (*used, *jaxpr.outvars))


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


def _parts(equation: Any) -> list[Any]:
    """Returns everything in an equation's parameters, out of tuples and the like."""
    return jax.tree.leaves([*equation.params.values()], is_leaf=_is_jaxpr)


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns")  # with constants or, in jax before 0.12, without
