"""Mutants: small mistakes in a copy of the project, which its tests must notice.

    python tests/mutants.py [--only WORD] [--jobs 2] [--list]

Each entry of mutants.toml is applied alone, and tests of the default tier run until one
fails, in this order:

1. the entry's `tests`;
2. of an algorithm (by its file or by the entry's `algorithm`): its recurrence, then all
   other tests of tests/library/algorithms with its name in theirs;
3. of any other file: all test files that import it, or a name that syncalgos or one of
   its packages has from it, themselves or by a module of tests/. What the project's own
   files import is not followed: nearly all tests would then import nearly all files.

A mutant is caught if a test fails with it and passes without it. The exit code is 1 if
fewer than 95 % of the mutants are caught; equivalent ones do not count.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
OF_ALGORITHMS = "tests/library/algorithms"
LEAST = 0.95
LIMIT = 1800  # seconds; a mutant may loop without an end


class Mutant(NamedTuple):
    """An entry of mutants.toml."""

    file: str
    before: str
    after: str
    reason: str
    tests: Sequence[str] = ()
    algorithm: str = ""
    equivalent: str = ""

    def applied(self, text: str) -> str:
        """The file's text with the mistake; raises a ValueError if it has no place."""
        count = text.count(self.before)
        if count != 1:
            raise ValueError(f"{self.file} has {self.before!r} {count} times, not once")
        return text.replace(self.before, self.after)


def mutants() -> list[Mutant]:
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return [Mutant(file, **row) for file, rows in tables.items() for row in rows]


def algorithms() -> list[str]:
    return sorted(x.stem for x in ROOT.glob("syncalgos/algorithms/[!_]*.py"))


def importers(file: str) -> list[str]:
    """The test files that import a file: see 3. above."""
    module = file.removesuffix(".py").replace("/", ".")
    package, _, last = module.rpartition(".")
    faces = ROOT / "syncalgos/_public.py", *ROOT.glob("syncalgos/*/__init__.py")
    known = "\n".join(face.read_text("utf-8") for face in faces)
    public = "|".join(re.findall(rf"^from {module} import (\w+)", known, re.M))
    listed = r"import (\([^)]*|.*)\b"  # on one line, or on several in brackets
    by_name = rf"(from|import) {module}\b|from {package} {listed}{last}\b"
    if public:
        of = rf"from syncalgos[\w.]* {listed}|\b(sa|syncalgos|reducers|collectives)\."
        by_name += rf"|({of})({public})\b"
    texts = {x: x.read_text("utf-8") for x in (ROOT / "tests").rglob("*.py")}
    found = {x for x, text in texts.items() if re.search(by_name, text)}
    before = None
    while found != before:
        before = found
        shared = [x for x in found if not x.stem.startswith("test_")]
        stems = "|".join(
            x.parent.name if x.stem == "__init__" else x.stem for x in shared
        )
        by_helper = (
            rf"^((from|import) [\w.]*|from support {listed})\b({stems or '-'})\b"
        )
        more = {x for x, text in texts.items() if re.search(by_helper, text, re.M)}
        found = found | more
    tests = (x for x in found if x.stem.startswith("test_"))
    return sorted(str(x.relative_to(ROOT)) for x in tests)


def stages(mutant: Mutant, tests: Sequence[str]) -> Iterator[Sequence[str]]:
    """The arguments of pytest for a mutant; `tests` are those of all algorithms."""
    yield mutant.tests
    own = Path(mutant.file).stem
    name = mutant.algorithm or (own if own in algorithms() else "")
    if name:
        others = [x for x in algorithms() if x.endswith(name) and x != name]
        chosen = " and not ".join(f"{x}-" for x in (name, *others))
        yield [f"{OF_ALGORITHMS}/test_recurrences.py", "-k", chosen]
        yield [x for x in tests if name in x and "test_recurrences" not in x]
    if own not in algorithms():
        yield importers(mutant.file)


def pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Files of one size within a second look alike to Python's caches of bytecode.
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    kept = {"capture_output": True, "text": True, "timeout": LIMIT}
    return subprocess.run([*command, *arguments], cwd=folder, env=env, **kept)


def failing(folder: Path, arguments: Sequence[str]) -> Sequence[str]:
    """The arguments with which only the first failing test runs; () if all pass."""
    try:
        done = pytest(folder, *arguments)
    except subprocess.TimeoutExpired:
        return arguments
    told = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.M)
    failed = [told[1]] if told else arguments
    return () if done.returncode in (0, 5) else failed  # 5: there is no test


def caught(mutant: Mutant, folder: Path, tests: Sequence[str]) -> str:
    """The first test that fails because of a mutant, or an empty text."""
    path = folder / mutant.file
    text = path.read_text("utf-8")
    for arguments in filter(None, stages(mutant, tests)):
        path.write_text(mutant.applied(text), "utf-8")
        failed = failing(folder, arguments)
        path.write_text(text, "utf-8")
        if failed and not failing(folder, failed):
            return " ".join(failed)
        if failed:
            print(f"fails without a mutant, too: {' '.join(failed)}", flush=True)
    return ""


def copied(folder: Path) -> Path:
    """Copies the project's files, committed or not, to a folder."""
    command = ["git", "ls-files", "-zco", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def tried(chosen: Sequence[Mutant], folder: Path) -> list[bool]:
    """Whether mutants are caught, one after the other in a copy of the project."""
    copy = copied(folder)
    found = []
    listed = pytest(copy, "--collect-only", OF_ALGORITHMS).stdout
    tests = [line for line in listed.splitlines() if "::" in line]
    for mutant in chosen:
        began = time.monotonic()
        test = caught(mutant, copy, tests)
        told = f"{time.monotonic() - began:4.0f} s  {mutant.file}: {mutant.reason}"
        print(f"caught   {told}  {test}" if test else f"SURVIVED {told}", flush=True)
        found.append(bool(test))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Tries the mutants of mutants.toml.")
    parser.add_argument("--only", default="", help="a part of the file or the reason")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    parser.add_argument("--list", action="store_true", help="only list them")
    options = parser.parse_args()
    chosen = [x for x in mutants() if options.only in f"{x.file}: {x.reason}"]
    if options.list:
        print("\n".join(f"{x.file}: {x.equivalent or x.reason}" for x in chosen))
        return 0
    counted = [x for x in chosen if not x.equivalent]
    jobs = range(options.jobs)
    with tempfile.TemporaryDirectory() as copies, ThreadPoolExecutor() as pool:
        shares = [counted[job :: options.jobs] for job in jobs]
        folders = [Path(copies, str(job)) for job in jobs]
        found = [*chain.from_iterable(pool.map(tried, shares, folders))]
    print(f"{sum(found)} of {len(found)} mutants are caught")
    return 0 if sum(found) >= LEAST * len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
