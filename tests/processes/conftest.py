"""Fixtures of the tests of commands that are lost or stopped."""

import pytest
from support.faults import commands


@pytest.fixture
def start(tmp_path):
    """Starts a command; in the end nobody of it may be left."""
    with commands(tmp_path) as start:
        yield start
