"""JSON files, checked against a schema; an error is one line that names the file.

A schema is a type: int, float (which accepts whole numbers), bool, str, None, Any, a
list, a dict by str, a union, a TypedDict or a dataclass. A TypedDict allows further
keys with any values. A dataclass does not; its fields with a default may be missing.
"""

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

MOST = 1 << 30  # bytes of a file
DIGITS = 18  # of a whole number: more could overflow in computations
LARGEST = 1e300  # number, for the same reason
SEAL = "sha256"
NAMES = {int: "a whole number", float: "a number", bool: "true or false"}
NAMES |= {str: "text", list: "a list", dict: "an object", types.NoneType: "null"}


class Damaged(ValueError):
    """A file, or a part of it, that is not as it was written; one line says why."""

    def __init__(self, path: Path | str, why: str):
        super().__init__(f"{path}: {why}")


def read(path: Path, schema: Any) -> Any:
    """Reads a file of JSON.

    Raises:
        Damaged: it is missing, is no regular file, or does not match the schema.
        OSError: it cannot be read.
    """
    content = _parsed(path, _text(path), "")
    check(path, content, schema, "it")
    return content


def read_lines(path: Path, schema: Any) -> list[Any]:
    """Reads a file with a JSON record in each line; raises the errors of `read`."""
    lines = _text(path).splitlines()
    found = [_parsed(path, x, f"line {i}: ") for i, x in enumerate(lines, 1)]
    for i, content in enumerate(found, 1):
        check(path, content, schema, f"line {i}")
    return found


def sealed(content: Mapping[str, Any], *beside: bytes) -> dict[str, Any]:
    """Returns content with a checksum of it and of the data beside it."""
    plain = {key: x for key, x in content.items() if key != SEAL}
    return {**plain, SEAL: _digest(plain, beside)}


def check_seal(path: Path, content: Mapping[str, Any], *beside: bytes) -> None:
    """Raises a Damaged if content was changed; files of 0.2 have no checksum."""
    if content.get(SEAL) not in (None, sealed(content, *beside)[SEAL]):
        raise Damaged(path, "it, or a file beside it, was changed since it was written")


def _digest(content: Mapping[str, Any], beside: Iterable[bytes]) -> str:
    parts = [json.dumps(content, sort_keys=True).encode(), *beside]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _text(path: Path) -> str:
    # It may be a folder, or a pipe, from which a read might never return.
    if path.exists() and not path.is_file():
        raise Damaged(path, "it is not a regular file")
    try:
        if path.stat().st_size > MOST:
            raise Damaged(path, f"it is longer than {MOST} bytes")
        return path.read_bytes().decode()
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(path, "it is missing") from None
    except UnicodeDecodeError:
        raise Damaged(path, "it is not valid UTF-8") from None


def _parsed(path: Path, text: str, where: str) -> Any:
    try:
        content = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_real,
            parse_int=_whole,
            parse_float=_real,
        )
        if "\\u" in text:  # half of a surrogate pair cannot be written
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"{where}it is not valid JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key appears twice")
    return found


def _whole(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"a whole number has {len(text)} digits")
    return int(text)


def _real(text: str) -> float:
    if not math.isfinite(found := float(text)):
        raise ValueError(f"a number is not finite: {text[:DIGITS]}")
    return found


def check(path: Path | str, value: Any, schema: Any, where: str) -> None:
    """Raises a Damaged unless a value matches the schema.

    Args:
        path: the file, or a name for a part of it, for the error.
        value: a value from JSON.
        schema: a type.
        where: the place of the value in the file, for the error.
    """
    options = _options(schema)
    fitting: Any = next((x for x in options if x is Any or _is_of(value, x)), None)
    if fitting is None:
        must = " or ".join(NAMES[_kind(x)] for x in options)
        shown = NAMES[type(value)] if isinstance(value, dict | list) else repr(value)
        raise Damaged(path, f"{where} must be {must}, got {shown[:40]}")
    inside = typing.get_args(fitting)
    if keys := _keys(fitting):
        for key, (kind, is_required) in keys.items():
            if key in value:
                check(path, value[key], kind, repr(key))
            elif is_required:
                raise Damaged(path, f"{where} has no {key!r}")
        unknown = [key for key in value if key not in keys]
        if unknown and dataclasses.is_dataclass(fitting):
            raise Damaged(path, f"{where} has the unknown key {unknown[0]!r}")
    elif isinstance(value, dict) and inside:
        for key, x in value.items():
            check(path, x, inside[1], repr(key))
    elif isinstance(value, list) and inside:
        for x in value:
            check(path, x, inside[0], f"an entry of {where}")


def _is_of(value: Any, schema: Any) -> bool:
    kind = _kind(schema)
    fits = type(value) is kind or (kind is float and type(value) is int)
    # JSON from elsewhere may have larger or infinite numbers.
    return fits and (kind not in (int, float) or -LARGEST <= value <= LARGEST)


@cache
def _options(schema: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the schema itself."""
    is_union = typing.get_origin(schema) in (typing.Union, types.UnionType)
    return typing.get_args(schema) if is_union else (schema,)


@cache
def _keys(schema: Any) -> dict[str, tuple[Any, bool]]:
    """Returns the type of each key of an object, and whether it is required."""
    if typing.is_typeddict(schema):
        required = schema.__required_keys__
    elif dataclasses.is_dataclass(schema):
        none = dataclasses.MISSING
        fields = dataclasses.fields(schema)
        required = {x.name for x in fields if x.default is x.default_factory is none}
    else:
        return {}
    hints = typing.get_type_hints(schema)
    return {key: (kind, key in required) for key, kind in hints.items()}


@cache
def _kind(schema: Any) -> Any:
    """Returns the Python type that a schema requires."""
    return dict if _keys(schema) else typing.get_origin(schema) or schema
