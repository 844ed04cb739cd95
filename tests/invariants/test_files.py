"""A file is whole or not there: what fails half way leaves the old one and nothing beside it."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from octopus_trl.errors import ConfigError
from octopus_trl.files import replacing, write_whole
from octopus_trl.report.files import write_file


@pytest.mark.parametrize("content", ["", "é\nb\r\n", b"", b"\x00\xff" * 100_000])
def test_a_file_holds_its_bytes(tmp_path: Path, content: str | bytes) -> None:
    for _ in range(2):  # new, then over itself
        write_whole(tmp_path / "a.json", content)
        want = content.encode() if isinstance(content, str) else content
        assert (tmp_path / "a.json").read_bytes() == want
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("old", [None, "old"])
def test_a_block_that_raises_changes_nothing(
    tmp_path: Path, error: type[BaseException], old: str | None
) -> None:
    path = tmp_path / "a"
    if old is not None:
        path.write_text(old)

    def stop_half_way() -> None:
        with replacing(path) as stream:
            stream.write(b"half")
            stream.flush()
            raise error

    with pytest.raises(error):
        stop_half_way()
    assert [item.read_text() for item in tmp_path.iterdir()] == ([] if old is None else [old])


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.replace"])
def test_a_disk_that_refuses_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "a"
    write_whole(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step, full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert [item.read_text() for item in tmp_path.iterdir()] == ["old"]


def test_the_bytes_are_on_the_disk_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, settled, sync = tmp_path / "a", [], os.fsync

    def settle(handle: int) -> None:
        settled.append((os.fstat(handle).st_size, path.exists()))
        sync(handle)

    monkeypatch.setattr("os.fsync", settle)
    write_whole(path, "x" * 9000)
    assert settled == [(9000, False)]


def test_the_file_is_not_there_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with replacing(path) as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as stream:
        stream.write(b"text")
        assert not path.exists()
    assert gzip.decompress(path.read_bytes()) == b"text"


def test_a_relative_path_is_taken_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_whole("a", "text")
    write_whole(Path("a"), "more")
    assert (tmp_path / "a").read_text() == "more"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("place", [".", "folder", "no/a", "file/a"])
def test_a_place_that_cannot_be_is_refused_and_made_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"folder|file|\.|no"):
        write_whole(place, "text")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.parametrize("place", [".", "folder", "file/a"])
def test_a_report_at_a_place_that_cannot_be_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written .*give another path"):
        write_file(Path(place), b"page")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_pipe_gets_the_bytes_and_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(path, "text")
        assert path.is_fifo()
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize("old", [None, "old"])
def test_a_link_stays_one_and_its_file_is_put_in_place(tmp_path: Path, old: str | None) -> None:
    folder, link = tmp_path / "far", tmp_path / "link"
    folder.mkdir()
    if old is not None:
        (folder / "a").write_text(old)
    link.symlink_to(Path("far") / "a")
    write_whole(link, "new")
    assert link.is_symlink()
    assert (folder / "a").read_text() == "new"
    assert os.listdir(folder) == ["a"]
    assert sorted(os.listdir(tmp_path)) == ["far", "link"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_mode_is_that_of_any_new_file(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "a", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == mode


def test_writers_at_once_never_share_a_file(tmp_path: Path) -> None:
    path, open_at_once = tmp_path / "a", threading.Barrier(8)
    seen: list[set[str]] = []

    def write(number: int) -> None:
        with replacing(path) as stream:
            stream.write(bytes([number]) * 5000)
            open_at_once.wait(timeout=30)
            seen.append(set(os.listdir(tmp_path)))
            open_at_once.wait(timeout=30)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(names) for names in seen] == [8] * 8
    held = path.read_bytes()
    assert len(held) == 5000
    assert len(set(held)) == 1
    assert os.listdir(tmp_path) == ["a"]


def test_a_killed_writer_leaves_the_old_file_and_the_next_one_writes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, "old")
    code = (
        "import os, signal, sys\n"
        "from octopus_trl.files import replacing\n"
        "with replacing(sys.argv[1]) as stream:\n"
        "    stream.write(b'half')\n"
        "    stream.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    (left,) = [item for item in tmp_path.iterdir() if item != path]
    assert left.name.startswith(".a."), "hidden, so that no glob of results takes it for one"
    write_whole(path, "new")
    assert path.read_text() == "new"
