"""Samples of a profile, by layer and by function."""

from __future__ import annotations

from bench.front_door.profile import shares

STACKS = """\
main (launcher/cli/main.py:3);run (uvloop/__init__.py:99);write (coordinator/entrypoints/http/server.py:7) 6
main (launcher/cli/main.py:3);run (uvloop/__init__.py:99);write (coordinator/entrypoints/http/server.py:9) 2
main (launcher/cli/main.py:3);pass_on (coordinator/attempt.py:380) 1
run (threading.py:1012) 1
"""


def test_the_innermost_frame_counts() -> None:
    found = shares(STACKS.splitlines())
    assert found["layers"] == {"coordinator/entrypoints": 0.8, "coordinator": 0.1, "threading.py": 0.1}
    assert found["functions"]["coordinator/entrypoints/http/server.py: write"] == 0.8
