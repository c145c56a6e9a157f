"""Pluggable synchronization algorithms for data-parallel training in JAX.

The public names are defined in `_public.py`, which is imported when one of them is
first used: importing jax takes most of a second, and a command line can refuse a flag
without it.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

__version__ = "0.4.0"

if TYPE_CHECKING:
    from syncalgos._public import *  # noqa: F403
else:

    def __getattr__(name):
        """Imports a module of the package by its name, or all public names."""
        is_name = name.isidentifier() and name[:2] != "__"
        if is_name and find_spec(f"{__name__}.{name}"):
            return import_module(f"{__name__}.{name}")
        names = import_module("syncalgos._names")
        if name == "ALIASES":
            return names.ALIASES
        # Other names are refused without jax.
        if name == "__all__" or name in names.read_public_names():
            public = {
                key: value
                for key, value in vars(import_module("syncalgos._public")).items()
                if key[0] != "_"
            }
            globals().update(public, __all__=[*public])
            return globals()[name]
        hint = names.suggest(name) if is_name else ""
        # `from syncalgos import NAME` would replace an AttributeError by an ImportError
        # without the hint.
        if sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":
            raise ImportError(f"cannot import name {name!r} from {__name__!r}{hint}")
        # With its name, Python does not add a suggestion of its own.
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}{hint}", name=name
        )

    def __dir__():
        """Lists the public names, which may not be imported yet."""
        return [*__getattr__("__all__"), "__version__"]
