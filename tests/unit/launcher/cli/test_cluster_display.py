"""What `splitserve up` shows and keeps of its processes' lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli.cluster_display import ClusterDisplay
from launcher.cluster.child_process import ChildSpec

SPEC = ChildSpec("decode-0", "decode", ("true",))


def test_lines_are_kept_also_of_a_worker_that_joins(tmp_path: Path) -> None:
    with ClusterDisplay([SPEC], "ready", tmp_path / "logs") as display:
        display.line(SPEC, "one", {"level": "info"})
        display.line(ChildSpec("decode-1", "decode", ("true",)), "two", {"level": "info"})
    assert (tmp_path / "logs" / "decode-0.log").read_text() == "one\n"
    assert (tmp_path / "logs" / "decode-1.log").read_text() == "two\n"


def test_a_full_disk_ends_nothing_and_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "decode-0.log").symlink_to("/dev/full")
    with ClusterDisplay([SPEC], "ready", tmp_path) as display:
        for _ in range(3):
            display.line(SPEC, "a line", {"level": "info"})
    said = capsys.readouterr().err
    assert said.count("log_dir: lines are lost") == 1
    assert "No space left on device" in said


def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "decode-1.log").mkdir()
    with ClusterDisplay([SPEC], "ready", tmp_path) as display:
        display.line(ChildSpec("decode-1", "decode", ("true",)), "a line", {"level": "info"})
    assert "log_dir: lines are lost" in capsys.readouterr().err
