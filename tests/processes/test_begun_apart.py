"""Processes that do not begin with the same model are told so, by leaf."""

import pytest
from support.commands import members


@pytest.mark.slow
def test_processes_that_begin_apart_are_told_which_leaf_differs(tmp_path):
    members("unequal_starts", 2, tmp_path, 240, JAX_NUM_CPU_DEVICES="2")
