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
    mutants_in_order = []
    for file, rows in tables.items():
        mutants_in_order += [Mutant(file, **row) for row in rows]
    return mutants_in_order


def algorithms() -> list[str]:
    return sorted(x.stem for x in ROOT.glob("syncalgos/algorithms/[!_]*.py"))


def importers(file: str) -> list[str]:
    """The test files that import a file: see 3. above."""
    module = file.removesuffix(".py").replace("/", ".")
    package, _, module_name = module.rpartition(".")
    faces = ROOT / "syncalgos/_public.py", *ROOT.glob("syncalgos/*/__init__.py")
    public_lines = "\n".join(face.read_text("utf-8") for face in faces)
    public = "|".join(re.findall(rf"^from {module} import (\w+)", public_lines, re.M))
    listed = r"import (\([^)]*|.*)\b"  # on one line, or on several in brackets
    by_name = rf"(from|import) {module}\b|from {package} {listed}{module_name}\b"
    if public:
        package_import = (
            rf"from syncalgos[\w.]* {listed}|\b(sa|syncalgos|reducers|collectives)\."
        )
        by_name += rf"|({package_import})({public})\b"
    texts = {x: x.read_text("utf-8") for x in (ROOT / "tests").rglob("*.py")}
    paths = {x for x, text in texts.items() if re.search(by_name, text)}
    old_paths = None
    while paths != old_paths:
        old_paths = paths
        shared = [x for x in paths if not x.stem.startswith("test_")]
        stems = "|".join(
            x.parent.name if x.stem == "__init__" else x.stem for x in shared
        )
        by_helper = (
            rf"^((from|import) [\w.]*|from support {listed})\b({stems or '-'})\b"
        )
        indirect_paths = {
            x for x, text in texts.items() if re.search(by_helper, text, re.M)
        }
        paths = paths | indirect_paths
    tests = (x for x in paths if x.stem.startswith("test_"))
    return sorted(str(x.relative_to(ROOT)) for x in tests)


def stages(mutant: Mutant, tests: Sequence[str]) -> Iterator[Sequence[str]]:
    """The arguments of pytest for a mutant; `tests` are those of all algorithms."""
    yield mutant.tests
    stem = Path(mutant.file).stem
    name = mutant.algorithm or (stem if stem in algorithms() else "")
    if name:
        longer_names = [x for x in algorithms() if x.endswith(name) and x != name]
        chosen = " and not ".join(f"{x}-" for x in (name, *longer_names))
        yield [f"{OF_ALGORITHMS}/test_recurrences.py", "-k", chosen]
        yield [x for x in tests if name in x and "test_recurrences" not in x]
    if stem not in algorithms():
        yield importers(mutant.file)


def pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Files of one size within a second look alike to Python's caches of bytecode.
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    options = {"capture_output": True, "text": True, "timeout": LIMIT}
    return subprocess.run([*command, *arguments], cwd=folder, env=env, **options)


def failing(folder: Path, arguments: Sequence[str]) -> Sequence[str]:
    """The arguments with which only the first failing test runs; () if all pass."""
    try:
        ended = pytest(folder, *arguments)
    except subprocess.TimeoutExpired:
        return arguments
    failure = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ended.stdout, re.M)
    failed = [failure[1]] if failure else arguments
    return () if ended.returncode in (0, 5) else failed  # 5: there is no test


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


def try_mutants(chosen: Sequence[Mutant], folder: Path) -> list[bool]:
    """Whether mutants are caught, one after the other in a copy of the project."""
    copy = copied(folder)
    results = []
    listed = pytest(copy, "--collect-only", OF_ALGORITHMS).stdout
    tests = [line for line in listed.splitlines() if "::" in line]
    for mutant in chosen:
        start_time = time.monotonic()
        test = caught(mutant, copy, tests)
        mutant_line = (
            f"{time.monotonic() - start_time:4.0f} s  {mutant.file}: {mutant.reason}"
        )
        print(
            f"caught   {mutant_line}  {test}" if test else f"SURVIVED {mutant_line}",
            flush=True,
        )
        results.append(bool(test))
    return results


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
        results = [*chain.from_iterable(pool.map(try_mutants, shares, folders))]
    print(f"{sum(results)} of {len(results)} mutants are caught")
    return 0 if sum(results) >= LEAST * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
