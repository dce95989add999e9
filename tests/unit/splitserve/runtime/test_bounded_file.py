"""Small files are read whole or refused, whatever their path leads to."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from splitserve.errors import ConfigError
from splitserve.runtime import bounded_file
from splitserve.runtime.bounded_file import read_named_file, read_named_text, read_small_file, read_small_text

pytestmark = pytest.mark.timeout(20)


def folder(path: Path) -> None:
    path.mkdir()


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def itself(path: Path) -> None:
    path.symlink_to(path)


def large(path: Path) -> None:
    path.write_bytes(bytes(65))


def test_a_file_and_a_link_to_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("ä\r\n".encode() + bytes(60))
    (tmp_path / "b").symlink_to("a")
    assert read_small_file(tmp_path / "b", 64) == "ä\r\n".encode() + bytes(60)
    assert read_small_text(tmp_path / "a", 64).startswith("ä\r\n")


def test_a_file_is_read_however_slow_its_disk_is(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    assert read_small_file(tmp_path / "a", 64, pipes="none") == b"x"


def test_the_null_device_is_an_empty_file() -> None:
    assert read_small_file(Path("/dev/null")) == b""


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (folder, "Is a directory"),
        (listening, "No such device"),
        (zeros, "neither a file nor a pipe"),
        (itself, "Too many levels"),
        (large, "more than 64 bytes"),
        (os.mkfifo, "nobody writes to the pipe"),
        (lambda path: None, "No such file"),
    ],
)
def test_anything_else_is_refused_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], why: str
) -> None:
    monkeypatch.setattr(bounded_file, "PIPE_WAIT_S", 0.1)
    make(tmp_path / "a")
    with pytest.raises(OSError, match=why):
        read_small_file(tmp_path / "a", 64)


def test_a_name_that_no_path_has_is_an_os_error() -> None:
    with pytest.raises(OSError, match="null"):
        read_small_file(Path("a\0b"))


@pytest.mark.parametrize(("written", "why"), [(b"x" * 64, None), (b"x" * 65, "more than 64 bytes")])
def test_a_pipe_is_read_to_its_end(written: bytes, why: str | None) -> None:
    reads, writes = os.pipe()
    writer = threading.Timer(0.05, lambda: (os.write(writes, written), os.close(writes)))
    writer.start()
    try:
        if why is None:
            assert read_small_file(Path(f"/dev/fd/{reads}"), 64) == written
        else:
            with pytest.raises(OSError, match=why):
                read_small_file(Path(f"/dev/fd/{reads}"), 64)
    finally:
        writer.join()
        os.close(reads)


class _Clock:
    """Each look at it is a second later."""

    now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_a_patient_reader_bounds_the_silence_of_a_pipe_and_not_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pieces(_Clock):
        """What writes a byte at each second look, until it has written 50."""

        def __init__(self, writes: int) -> None:
            self.writes, self.left = writes, 100

        def monotonic(self) -> float:
            self.left -= 1
            if self.left > 0 and self.left % 2:
                os.write(self.writes, b"x")
            elif self.left == 0:
                os.close(self.writes)
            return super().monotonic()

    monkeypatch.setattr(bounded_file, "PIPE_SILENCE_S", 3.0)
    for patient in (True, False):
        reads, writes = os.pipe()
        monkeypatch.setattr(bounded_file, "time", Pieces(writes))
        path = Path(f"/dev/fd/{reads}")
        if patient:
            assert read_small_file(path, 64, pipes="patient") == b"x" * 50
        else:
            with pytest.raises(TimeoutError, match="has not ended within 5 s"):
                read_small_file(path, 64)
            os.close(writes)
        os.close(reads)


def test_a_patient_reader_gives_up_on_a_silent_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_file, "PIPE_SILENCE_S", 0.1)
    reads, writes = os.pipe()
    os.write(writes, b"half")
    with pytest.raises(TimeoutError, match=r"has given nothing for 0\.1 s"):
        read_small_file(Path(f"/dev/fd/{reads}"), 64, pipes="patient")
    os.close(reads)
    os.close(writes)
    os.mkfifo(tmp_path / "a")
    with pytest.raises(TimeoutError, match="nobody writes"):
        read_small_file(tmp_path / "a", 64, pipes="patient")


def test_a_reader_that_is_paused_still_sees_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_file, "PIPE_WAIT_S", 0.5)
    monkeypatch.setattr(bounded_file, "time", _Clock())  # over before the first look
    os.mkfifo(tmp_path / "a")
    with pytest.raises(TimeoutError, match="nobody writes"):
        read_small_file(tmp_path / "a", 64)


def test_a_pipe_may_be_no_choice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(OSError, match="no regular file"):
        read_small_file(tmp_path / "a", 64, pipes="none")


def test_a_named_file_fails_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace: cannot read .*a: No such file") as caught:
        read_named_file(tmp_path / "a", "trace")
    assert caught.value.field == "trace"
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfab\xff")
    with pytest.raises(ConfigError, match=r"trace: .*a is no UTF-8 text, at byte 5"):
        read_named_text(tmp_path / "a", "trace")
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfab")
    assert read_named_text(tmp_path / "a", "trace", encoding="utf-8-sig") == "ab"


def test_a_pipe_that_stays_open_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_file, "PIPE_WAIT_S", 0.1)
    reads, writes = os.pipe()
    os.write(writes, b"half")
    try:
        with pytest.raises(TimeoutError, match="has not ended"):
            read_small_file(Path(f"/dev/fd/{reads}"), 64)
    finally:
        os.close(reads)
        os.close(writes)
