"""Pluggable synchronization algorithms for data-parallel training in JAX.

The public names are defined in `_public.py`, which is imported when one of them is
first used: importing jax takes most of a second, and a command line can refuse a flag
without it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

__version__ = "0.3.0"

if TYPE_CHECKING:
    from syncalgos._public import *  # noqa: F403
else:

    def __getattr__(name):
        """Imports a module of the package by its name, or all public names."""
        if find_spec(f"{__name__}.{name}"):
            return import_module(f"{__name__}.{name}")
        names = vars(import_module("syncalgos._public"))
        public = {key: value for key, value in names.items() if key[0] != "_"}
        public["__all__"] = [*public]
        globals().update(public)
        if name not in public:
            now = import_module("syncalgos.removed").INSTEAD.get(name)
            hint = f": {now}" if now else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
        return public[name]

    def __dir__():
        """Lists the public names, which may not be imported yet."""
        return [*__getattr__("__all__"), "__version__"]
