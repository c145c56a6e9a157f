"""Where the real data sets lie, for the tests that read them."""

import os
from pathlib import Path

import pytest

BESIDE = Path(__file__).parents[3] / "shared" / "data"


def folder_with(*names):
    """The data folder, $SYNCALGOS_DATA or that beside the checkout.

    Skips the test if it lacks one of the names: a test downloads nothing.
    """
    folder = Path(os.environ.get("SYNCALGOS_DATA") or BESIDE)
    if lacking := [name for name in names if not (folder / name).is_file()]:
        pytest.skip(f"{folder} lacks {', '.join(lacking)}: name it in SYNCALGOS_DATA")
    return folder
