"""Completion of the command lines by a real bash, as argcomplete sets it up."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from support.commands import run_program

pytest.importorskip("argcomplete")
BIN = Path(sys.executable).parent

# What bash does when TAB is pressed at the end of each line of stdin.
PRESS = """
eval "$(activate-global-python-argcomplete --dest=-)"
compopt() { :; }  # bash knows it only while it completes
while IFS= read -r COMP_LINE; do
    COMP_POINT=${#COMP_LINE} COMP_TYPE=9 COMPREPLY=()
    read -ra COMP_WORDS <<< "$COMP_LINE"
    [[ $COMP_LINE == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _python_argcomplete_global python "${COMP_WORDS[COMP_CWORD]}"
    echo "${COMPREPLY[@]}"
done
"""
OUTER = ["--out", "--outer-lr", "--outer-momentum"]
LINES = {
    "run --algo diloco --ou": OUTER,  # own flags, too
    "run --algo nonse --steps 3 --ou": OUTER[:1],
    "run --data-dir exper": ["experiments/"],
    "compare --tune-s": ["--tune-seeds"],
    "aim --step": ["--step-time"],
}


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
def test_tab_completes_flags_and_files():
    lines = "".join(f"python -m experiments.{line}\n" for line in LINES)
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    ended = run_program(["bash", "-c", PRESS], stdin_text=lines, PATH=path)
    assert ended.returncode == 0, ended.stderr
    completions = [line.split() for line in ended.stdout.splitlines()]
    assert dict(zip(LINES, completions, strict=True)) == LINES
