"""`make setup` by uv or by pip: what pip is configured with holds for both."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dev import installer
from dev.install_torch import offered_version
from dev.installer import install, pip_settings, uv_options

LISTING = """\
global.index-url='https://mirror/simple'
global.extra-index-url='file:///a/simple\\nfile:///b/simple'
install.no-index='false'
:env:.find-links='/wheels'
:env:.index-url='https://nearer/simple'
"""
TOOL = """#!{python}
import os, sys
open({log!r}, "w").write(repr((sys.argv[1:], os.environ.get("SSL_CERT_FILE"))))
print("Would install 1 package", file=sys.stderr)
print(" + torch==2.9.0+cpu", file=sys.stderr)
"""


def test_the_environment_has_the_last_word_over_pip_s_files() -> None:
    settings = pip_settings(LISTING)
    assert settings["index-url"] == "https://nearer/simple"
    assert settings["find-links"] == "/wheels"
    assert settings["extra-index-url"].split() == ["file:///a/simple", "file:///b/simple"]


def test_uv_is_told_the_same_indexes() -> None:
    assert uv_options(pip_settings(LISTING), {}) == [
        *("--index-strategy", "unsafe-best-match", "--default-index", "https://nearer/simple"),
        *("--index", "file:///a/simple", "--index", "file:///b/simple", "--find-links", "/wheels"),
    ]
    assert uv_options({"no-index": "1"}, {})[-1] == "--no-index"
    assert uv_options(pip_settings(LISTING), {"UV_INDEX": "https://own/simple"}) == []


def test_uv_installs_into_this_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, uv = tmp_path / "log", tmp_path / "uv"
    uv.write_text(TOOL.format(python=sys.executable, log=str(log)))
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(installer, "uv_options", lambda _settings, _environment: ["--no-index"])
    monkeypatch.setenv("PIP_CERT", "/certs.pem")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    assert offered_version("torch==2.9.0", "--index-url", "x") == "2.9.0+cpu"
    install(["--no-compile", "--editable", "."])
    assert log.read_text() == repr(
        (
            ["pip", "install", "--python", sys.executable, "--no-index", "--quiet", "--editable", "."],
            "/certs.pem",
        )
    )
