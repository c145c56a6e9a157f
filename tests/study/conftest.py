"""Small pictures in the reports that are made in this process."""

import pytest

from experiments.study import page


@pytest.fixture(scope="session", autouse=True)
def small_pictures():
    """PNG takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "DPI", 20)
        yield
