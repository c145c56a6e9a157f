"""Data files, from real servers on this machine and from the user's own folder."""

import errno
import fcntl
import hashlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.commands import ROOT
from support.formats import put

from experiments.data import downloads

TIMEOUT = 60  # seconds, of what takes one
CONTENT = bytes(range(256)) * 4096  # 1 MiB
SHA256 = hashlib.sha256(CONTENT).hexdigest()
OTHER = CONTENT[:-1] + b"!"
CLOSED = "http://127.0.0.1:9/data.bin"  # discards, where anything listens


class FileServer:
    """Serves CONTENT in the manner that a path names; notes what was asked."""

    def __init__(self):
        self.requested_paths = []
        self.stalled = threading.Event()  # half of /slow is sent
        self.go_on = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.requested_paths.append(self.path)
                outer.answer(self)

            def log_message(self, format, *args):
                """Nothing: the test's output is not the place."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}"

    def answer(self, handler):
        if handler.path == "/absent":
            handler.send_error(404)
            return
        content = {"/other": OTHER, "/more": CONTENT * 2}.get(handler.path, CONTENT)
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[: len(content) // 2])
        handler.wfile.flush()
        if handler.path == "/cut":
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        if handler.path == "/slow":
            self.stalled.set()
            self.go_on.wait(TIMEOUT)
        try:
            handler.wfile.write(content[len(content) // 2 :])
        except OSError:
            return  # whoever asked is gone, as some tests want it


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    serving = FileServer()
    thread = threading.Thread(target=serving.http.serve_forever, args=(0.01,))
    thread.start()
    yield serving
    serving.go_on.set()
    serving.http.shutdown()
    thread.join()
    serving.http.server_close()


def pinned(server, *paths):
    urls = tuple(server.address + path for path in paths)
    return downloads.File("set/data.bin", len(CONTENT), SHA256, urls)


def list_files(folder):
    """All files below a folder."""
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def refused(file, folder, *convert):
    """The one line of a refusal."""
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        downloads.find(file, folder, *convert)
    return str(caught.value)


def test_a_missing_file_is_downloaded_once_and_verified(server, tmp_path, capsys):
    file = pinned(server, "/whole")
    path = downloads.find(file, tmp_path)
    assert path == tmp_path / "set" / "data.bin"
    assert path.read_bytes() == CONTENT
    (tmp_path / "any").touch()
    assert path.stat().st_mode == (tmp_path / "any").stat().st_mode
    (tmp_path / "any").unlink()
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "downloading set/data.bin (1.049 MB) from 127.0.0.1\n"
    assert downloads.find(file, tmp_path) == path
    assert server.requested_paths == ["/whole"]
    assert list_files(tmp_path) == {"set/data.bin"}


def test_a_terminal_is_shown_a_progress_bar(server, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    downloads.find(pinned(server, "/whole"), tmp_path)
    assert "━" in terminal.getvalue() and "1.0/1.0 MB" in terminal.getvalue()


@pytest.mark.parametrize(
    "path, reason",
    [
        ("/other", f"its SHA-256 is {hashlib.sha256(OTHER).hexdigest()}"),
        ("/more", f"it sends more than {len(CONTENT)} bytes"),
        ("/cut", "the connection broke off"),
        ("/absent", "HTTP 404"),
        (CLOSED, "the connection failed"),
    ],
)
def test_a_failed_download_leaves_nothing_and_says_why_in_one_line(
    path, reason, server, tmp_path
):
    folder = tmp_path / "new" / "data"
    url = path if path == CLOSED else server.address + path
    message = refused(pinned(server, path)._replace(urls=(url,)), folder)
    assert f"{url}: {reason})" in message
    for part in ("set/data.bin", str(folder / "set"), SHA256, str(len(CONTENT))):
        assert part in message
    assert [*tmp_path.iterdir()] == []


def test_the_mirror_is_tried_when_the_official_source_fails(server, tmp_path, capsys):
    path = downloads.find(pinned(server, "/other", "/whole"), tmp_path)
    assert path.read_bytes() == CONTENT
    assert server.requested_paths == ["/other", "/whole"]
    assert list_files(tmp_path) == {"set/data.bin"}
    assert len(capsys.readouterr().err.splitlines()) == 3  # two sources, one reason


def test_a_server_that_falls_silent_is_given_up(server, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "TIMEOUT", (5, 0.3))
    with pytest.raises(ValueError, match="the connection failed"):
        downloads.find(pinned(server, "/slow"), tmp_path)
    assert list_files(tmp_path) == set()


def test_what_is_served_is_converted_before_it_is_verified(server, tmp_path):
    turned = hashlib.sha256(CONTENT[::-1]).hexdigest()
    file = pinned(server, "/whole")._replace(sha256=turned)
    path = downloads.find(file, tmp_path, lambda part: part.read_bytes()[::-1])
    assert path.read_bytes() == CONTENT[::-1]
    path.unlink()
    assert f"its SHA-256 is {SHA256}" in refused(file, tmp_path, Path.read_bytes)

    def refuse(part):
        raise ValueError("the archive is refused")

    assert "/whole: the archive is refused)" in refused(file, tmp_path, refuse)
    assert list_files(tmp_path) == set()


@pytest.mark.parametrize("content", [OTHER, CONTENT[:1000], b""], ids=len)
def test_an_altered_file_is_named_with_both_checksums_and_kept(
    content, server, tmp_path
):
    path = tmp_path / put(tmp_path, "set/data.bin", content).path
    message = refused(pinned(server, "/whole"), tmp_path)
    for part in (str(path), SHA256, hashlib.sha256(content).hexdigest(), "Remove it"):
        assert part in message
    assert path.read_bytes() == content
    assert server.requested_paths == []
    assert list_files(tmp_path) == {"set/data.bin"}


def test_a_data_folder_that_is_complete_is_only_read(server, tmp_path):
    path = tmp_path / put(tmp_path, "set/data.bin", CONTENT).path
    old_times = [p.stat().st_mtime_ns for p in (path, path.parent, tmp_path)]
    assert downloads.find(pinned(server, "/whole"), tmp_path) == path
    assert [p.stat().st_mtime_ns for p in (path, path.parent, tmp_path)] == old_times
    assert server.requested_paths == []


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("whole", "whole/set/data.bin cannot be read: "),  # a folder in its place
        ("file", "file/set/data.bin cannot be read: "),  # a file in the folder's
        ("/proc/syncalgos", "/proc/syncalgos/set cannot be written"),
    ],
)
def test_what_is_in_the_way_is_told_in_one_line(folder, message, server, tmp_path):
    (tmp_path / "whole" / "set" / "data.bin").mkdir(parents=True)
    (tmp_path / "file").touch()
    if folder.startswith("/proc") and not Path("/proc").is_dir():
        pytest.skip("there is no /proc")
    assert message in refused(pinned(server, "/whole"), tmp_path / folder)
    assert server.requested_paths == []


def test_the_data_folder_is_the_argument_the_environment_or_the_cache(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SYNCALGOS_DATA", str(tmp_path / "named"))
    assert downloads.folder(tmp_path) == tmp_path
    assert downloads.folder() == tmp_path / "named"
    monkeypatch.setenv("SYNCALGOS_DATA", "~/data")
    assert downloads.folder() == Path.home() / "data"
    monkeypatch.setenv("SYNCALGOS_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache = downloads.folder()
    assert cache.name == "syncalgos"
    assert cache.parent == tmp_path / "cache" or sys.platform != "linux"
    monkeypatch.delenv("SYNCALGOS_DATA")
    assert downloads.folder() == cache


# The harness's handlers only take note, so that a dispatch is ended properly.
DOWNLOAD = """
import signal, sys
from pathlib import Path
from experiments.data import downloads

def note(number, frame):
    print("noted", flush=True)

signal.signal(signal.SIGINT, note)
signal.signal(signal.SIGTERM, note)
try:
    downloads.find(downloads.File("set/data.bin", int(sys.argv[2]), *sys.argv[3:4],
        (sys.argv[4],)), Path(sys.argv[1]))
except KeyboardInterrupt:
    sys.exit(130)
finally:
    assert signal.getsignal(signal.SIGINT) is note
    assert signal.getsignal(signal.SIGTERM) is note
"""


@contextmanager
def downloading(server, folder):
    """Yields a process that has half of a file, and where its output goes."""
    output = folder.with_name(f"{folder.name}.output")
    file = pinned(server, "/slow")
    arguments = [str(folder), str(file.size), file.sha256, file.urls[0]]
    with output.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", DOWNLOAD, *arguments],
            cwd=ROOT,
            stdout=out,
            stderr=out,
        )
    try:
        assert server.stalled.wait(TIMEOUT), output.read_text()
        yield process, output
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 75)], ids=str
)
def test_a_signal_ends_a_download_at_once_and_leaves_no_part(
    number, code, server, tmp_path
):
    with downloading(server, tmp_path) as (process, output):
        assert len(list_files(tmp_path)) == 2  # the part, and its lock
        process.send_signal(number)
        assert process.wait(10) == code, output.read_text()
    assert output.read_text().startswith("downloading set/data.bin")
    assert "noted" not in output.read_text()
    assert list_files(tmp_path) == set()


def test_what_a_killed_download_left_goes_at_the_next(server, tmp_path):
    with downloading(server, tmp_path) as (process, _):
        process.kill()
        process.wait()
    part, lock = sorted(list_files(tmp_path))
    assert lock == "set/.data.bin.lock"
    assert re.fullmatch(r"set/\.data\.bin\.[0-9a-f]{8}\.tmp", part)
    (tmp_path / "set" / ".data.bin.syncalgos.part").touch()  # as 0.3 named them
    foreign_files = [".data.bin.of-mine.tmp", ".data.bin2.syncalgos.part"]
    for name in foreign_files:
        (tmp_path / "set" / name).touch()
    downloads.find(pinned(server, "/whole"), tmp_path)
    assert list_files(tmp_path) == {
        "set/data.bin",
        *(f"set/{name}" for name in foreign_files),
    }


@pytest.mark.parametrize("convert", [(), (Path.read_bytes,)], ids=["as it is", "made"])
def test_a_link_in_place_of_a_part_is_not_followed(
    convert, server, tmp_path, monkeypatch
):
    folder = tmp_path / "data" / "set"
    other = tmp_path / "of-another"
    folder.mkdir(parents=True)
    other.write_text("kept")
    monkeypatch.setattr("secrets.token_hex", lambda count: "0badcafe")
    links = [folder / f".data.bin{x}.tmp" for x in ("", ".0badcafe")]
    links[0].symlink_to(other)
    (folder / ".data.bin.lock").symlink_to(other)
    file = pinned(server, "/whole")
    path = downloads.find(file, tmp_path / "data", *convert)
    assert not path.is_symlink() and path.read_bytes() == CONTENT
    path.unlink()
    links[1].symlink_to(other)  # even if its name was guessed
    assert "cannot be written: File exists" in refused(file, tmp_path / "data")
    assert other.read_text() == "kept"
    assert [*folder.iterdir()] == links[1:]


def test_a_part_of_another_user_is_left(server, tmp_path):
    """Such as one that is being downloaded, where there are no locks."""
    if os.geteuid() != 0:
        pytest.skip("only root makes files for others")
    (folder := tmp_path / "set").mkdir()
    part = folder / ".data.bin.12345678.tmp"
    part.touch()
    os.chown(part, 12345, -1)
    downloads.find(pinned(server, "/whole"), tmp_path)
    assert list_files(tmp_path) == {"set/data.bin", f"set/{part.name}"}


def test_of_two_processes_that_want_a_file_one_downloads_it(server, tmp_path):
    file = pinned(server, "/whole")
    with downloading(server, tmp_path) as (process, output):
        second = threading.Thread(target=downloads.find, args=(file, tmp_path))
        second.start()
        second.join(0.2)
        assert second.is_alive()
        server.go_on.set()
        assert process.wait(TIMEOUT) == 0, output.read_text()
        second.join()
    assert server.requested_paths == ["/slow"]
    assert list_files(tmp_path) == {"set/data.bin"}
    assert downloads.find(file, tmp_path).read_bytes() == CONTENT


def test_a_folder_without_locks_is_filled(server, tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    downloads.find(pinned(server, "/whole"), tmp_path)
    assert list_files(tmp_path) == {"set/data.bin"}
