"""Compiles all requested programs, each in a separate process, and reports the results.

The process is python -m experiments.aim.jobs. Its argument is a request in JSON; it
answers with a line of JSON on stdout. A separate process allows the compiler's
variables to be set before jax starts, catches its messages, and frees its memory.
"""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments import files
from experiments.aim import tables, targets
from experiments.aim.answer import Answer
from experiments.aim.config import PROGRAM, AimConfig, CompileJob
from experiments.aim.tables import Result
from experiments.command import stopping, terminal
from experiments.command.errors import BadRequest, Unwritten, in_one_line, refusal
from experiments.command.stopping import before_the_end, printable
from experiments.command.text_tables import terminal_width
from experiments.training import config as training

JobKey = tuple[Any, ...]
"""A target's name and slices, and the flags of a run: equal for equal programs."""
ROOT = Path(__file__).parents[2]
# Lines of libtpu and of plug-ins that do not explain a failure.
NOISE = re.compile("^(WARNING|Failed to find host bounds|E0000|===|learning/)")
MOST_CHARACTERS = 400  # of a process's last words


class EarlierProgram(NamedTuple):
    """A program of a file of --reuse.

    Attributes:
        answer: the answer of the process that compiled it.
        content: all that the file holds of it.
    """

    answer: Answer
    content: Mapping[str, Any]


EarlierPrograms = Mapping[JobKey, EarlierProgram]


def run_jobs(config: AimConfig, argv: list[str]) -> int:
    """Compiles one program after the other, and shows and writes the results.

    Shows a bar if stderr is a terminal, otherwise a line for each program.

    Args:
        config: the checked config.
        argv: flags of the command, to record in its files.

    Returns:
        The exit code: 0, or 1 where a program could not be compiled.

    Raises:
        BadRequest: all requested programs are refused (with the reason of the first),
            a compiler is missing, or a file cannot be read or written (`Unwritten`).
    """
    earlier = read_earlier(config)
    jobs = config.jobs
    for job in jobs:
        if _key(job) not in earlier:
            targets.check_compiler(job.target)
    answers: list[Answer] = []
    results: tuple[Result, ...] = ()
    with terminal.bar(terminal.elapsed_time()) as bar:
        task = bar.add_task("", total=len(jobs))
        for number, job in enumerate(jobs, 1):
            name = f"{job.variant.label} for {job.target.full_name}"
            bar.update(task, description=f"compiling {name}")
            is_new = _key(job) not in earlier
            if is_new:
                answer = compile_job(job, config.timeout)
            else:
                answer = earlier[_key(job)].answer
            answers.append(answer)
            are_refused = all(x.error is not None for x in answers)
            if number == len(config.variants) and are_refused:
                raise BadRequest(str(answers[0].error))
            bar.update(task, completed=number)
            terminal.above(
                bar, f"{number}/{len(jobs)} {name}: {tables.outcome(answer)}"
            )
            # Reused answers are in their file already.
            if is_new or number == len(jobs):
                results = tables.make_results(config, answers)
                if config.json is not None and not are_refused:
                    _write(config.json, _as_json(config, argv, results, earlier))
    terminal.show(tables.format_text(config, results, terminal_width()))
    if config.page is not None:
        _write(config.page, tables.format_markdown(config, argv, results))
    return stopping.FAILED if any(not x.is_done for x in results) else 0


def _key(job: CompileJob) -> JobKey:
    return job.target.text, job.target.slices, *job.argv


def read_earlier(config: AimConfig) -> EarlierPrograms:
    """Returns the compiled programs in the files of --reuse.

    Raises:
        BadRequest: a file was not written by --json, or is damaged.
    """
    programs: dict[JobKey, EarlierProgram] = {}
    for path in config.reuse:
        try:
            content = files.read(path, "programs")
            with files.using(path):
                for program in content["programs"]:
                    if "compile_seconds" not in program:
                        continue
                    # Each must have its checksum, and the right one.
                    files.check_seal(path, {files.SEAL: None, **program})
                    target = program["target"]
                    key = target["text"], target["slices"], *program["argv"]
                    answer = Answer.from_json(program)
                    programs[key] = EarlierProgram(answer, program)
        except OSError as error:
            reason = error.strerror or error
            raise refusal(error, f"--reuse {path}: {reason}") from None
        except files.Damaged as error:
            raise BadRequest(
                f"--reuse {error}: give a file written by --json"
            ) from None
    return programs


def _as_json(
    config: AimConfig,
    argv: list[str],
    results: Sequence[Result],
    earlier: EarlierPrograms,
) -> str:
    """Returns the file of --json: one line per program, so that files can be compared.

    It keeps earlier programs if --reuse names this file, too.
    """
    programs: list[Mapping[str, Any]] = []
    keys: set[JobKey] = set()
    for result in results:
        key = _key(result.job)
        keys.add(key)
        findings = result.answer.to_json()
        if key in earlier:  # a file of an earlier release may say more of a program
            findings = earlier[key].content
        programs.append(_seal_result(result, findings))
    if config.json in config.reuse:
        programs += [x.content for key, x in earlier.items() if key not in keys]
    lines = ",\n".join(map(json.dumps, programs))
    command = json.dumps([*PROGRAM.split(), *argv])
    return f'{{"command": {command},\n"programs": [\n{lines}\n]}}\n'


def _seal_result(result: Result, findings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a result as JSON with a checksum: bytes and seconds, not rounded."""
    job = result.job
    target = result.job.target
    content = {
        # Earlier ones have the fields below, too, of other chip data or networks.
        **findings,
        "target": {**target._asdict(), "chips": target.chips},
        "label": job.variant.label,
        "algo": job.variant.algo,
        "argv": job.argv,
        "is_asked": result.is_asked,
        "fits": result.fits,
        "chip_bytes": result.chip_bytes,
        "modelled": result.times,
        "compared": result.comparison,
    }
    # Converted as it will be read, because the checksum is computed from that.
    return files.seal(json.loads(json.dumps(_as_dicts(content))))


def _as_dicts(value: Any) -> Any:
    """Returns a value with its NamedTuples as dicts."""
    value = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(value, dict):
        return {key: _as_dicts(x) for key, x in value.items()}
    return [*map(_as_dicts, value)] if isinstance(value, list | tuple) else value


def _write(path: Path, text: str) -> None:
    try:
        if path.exists() and not path.is_file():  # such as /dev/stdout
            path.write_text(text, "utf-8")
        else:
            files.write(path.resolve(), text)
    except OSError as error:
        raise Unwritten(f"{path}: {error.strerror or error}") from None


def compile_job(job: CompileJob, timeout: float | None) -> Answer:
    """Has a job compiled, and returns the answer of its process.

    Args:
        job: the program to compile.
        timeout: seconds to wait; None waits forever.
    """
    target = job.target
    request = {"argv": job.argv, "target": target.text, "slices": target.slices}
    python_path = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    variables = targets.compiler_environment(target) | {
        # The time must be that of the compiler, not of reading a cached file.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join(python_path),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.aim.jobs", json.dumps(request)],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Ctrl-C in a terminal reaches only this process, which ends the other.
        start_new_session=True,
        text=True,
    )
    # Its stdin stays open: the process ends when it closes, however this one ends.
    open_stdin = process.stdin
    process.stdin = None
    assert open_stdin is not None
    # The handler only kills: this thread may hold a lock while it waits.
    with process, open_stdin, before_the_end(process.kill):
        try:
            text, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            return Answer(timeout=timeout)
    if process.returncode == 0:
        return Answer.from_json(json.loads(text))
    lines = [x for x in errors.splitlines() if x.strip() and not NOISE.match(x)]
    last_line = "it printed nothing"
    if lines:
        last_line = printable(lines[-1])[:MOST_CHARACTERS]
    code = process.returncode
    if code < 0:
        return Answer(
            failed=f"the compiling process ended with signal {-code}: {last_line}"
        )
    return Answer(
        failed=f"the compiling process ended with exit code {code}: {last_line}"
    )


def answer_request() -> None:
    """Answers the request, in the process that compiles."""
    # Compilers print on both streams: the answer gets a separate descriptor.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer_file:
        os.dup2(2, 1)
        request = json.loads(sys.argv[1])
        threading.Thread(target=_end_with_parent, daemon=True).start()
        try:
            target = targets.parse_target(request["target"], request["slices"])
            run_config = training.parse(request["argv"])
            from experiments.aim.compile import compile_run  # imports jax

            answer = Answer(compile_run(run_config, target))
        except BadRequest as error:
            answer = Answer(error=in_one_line(error))
        json.dump(answer.to_json(), answer_file)


def _end_with_parent() -> None:
    """Ends the process when stdin closes, because nobody waits for the answer then."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    answer_request()
