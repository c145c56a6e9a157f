"""Pluggable synchronization algorithms for data-parallel training in JAX.

The public names are defined in `_public.py`, which is imported when one of them is
first used: importing jax takes most of a second, and a command line can refuse a flag
without it.
"""

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.4.0"

if TYPE_CHECKING:
    from syncalgos._public import *  # noqa: F403
else:
    _LISTS = "_public.py", "algorithms/__init__.py"

    def __getattr__(name):
        """Imports a module of the package by its name, or all public names."""
        is_name = name.isidentifier() and name[:2] != "__"
        if is_name and find_spec(f"{__name__}.{name}"):
            return import_module(f"{__name__}.{name}")
        # Other words than those of the lists of names are refused without jax.
        lists = (Path(__file__).parent / x for x in _LISTS)
        if name == "__all__" or (
            is_name and any(re.search(rf"\b{name}\b", x.read_text()) for x in lists)
        ):
            names = vars(import_module("syncalgos._public"))
            public = {key: value for key, value in names.items() if key[0] != "_"}
            globals().update(public, __all__=[*public])
        if name not in globals():
            now = import_module("syncalgos.removed").INSTEAD.get(name)
            hint = f": {now}" if now else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
        return globals()[name]

    def __dir__():
        """Lists the public names, which may not be imported yet."""
        return [*__getattr__("__all__"), "__version__"]
