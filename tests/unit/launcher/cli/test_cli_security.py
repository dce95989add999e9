"""`splitserve certs` and `splitserve keys`, wrong security settings, and the warnings at the start."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from coordinator.tenants.access_control import AccessControl
from launcher.cli.main import main
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import ConfigError
from splitserve.rpc.credentials import warn_if_open
from splitserve.security.api_keys import key_hash


def test_keys_new_shows_a_key_and_its_hash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == f'- "{key_hash(lines[1])}"'
    assert main(["keys", "new"]) == 0
    assert capsys.readouterr().out.splitlines()[1] != lines[1]


def test_certs_replaces_only_with_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "new" / "certs")
    assert main(["certs", folder, "--host", "front.example", "--host", "10.0.0.1", "--days", "5"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("ca.pem")
    assert main(["certs", folder]) == 1
    assert "--force" in capsys.readouterr().err
    assert main(["certs", folder, "--force", "--worker", "d-1"]) == 0
    assert (tmp_path / "new" / "certs" / "worker-d-1-key.pem").exists()
    for worker in ("", "decode/a", "a b", "x" * 65):
        assert main(["certs", folder, "--force", "--worker", worker]) == 2
    assert main(["certs", str(tmp_path / "other"), "--host", "имя"]) == 2
    assert "host must be a name or an address" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "--tls", "/nowhere"], "tls.authority: cannot read"),
        (["status", "--api-key", "two words\n"], "api_key must be 1..512 printable"),
        (["health", "--role", "king"], "role must be one of coordinator"),
        *(
            (["coordinator", "--allowed-origins", origin], "scheme://host[:port], lower case, no path")
            for origin in (
                "https://Good.example",
                "https://good.example:443",
                "https://*.example",
                "https://gôod.example",
                "http://a:99999",
                "http://a/",
            )
        ),
    ],
)
def test_wrong_settings_end_with_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert message in error[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tls": {"directory": "/nowhere"}}, r"tls\.authority: cannot read"),
        ({"tls": {}}, r"tls\.authority: missing"),
        ({"tenants": "/nowhere.yaml"}, "cannot read /nowhere.yaml"),
        ({"cluster_token_file": "/nowhere"}, "cluster_token_file: cannot read"),
    ],
)
def test_a_coordinator_does_not_start_with_wrong_files(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AccessControl(CoordinatorConfig.model_validate(settings))


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True), ("::", True)])
def test_who_listens_beyond_loopback_hears_of_it(
    host: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "splitserve")
    AccessControl(CoordinatorConfig(host=host)).warn_if_open(host)
    warn_if_open("worker", host, closed=True)
    assert [(r.getMessage(), r.levelname) for r in caplog.records] == [("security.open", "WARNING")] * warned


def test_keys_in_the_clear_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "splitserve")
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: [{name: a}]")
    AccessControl(CoordinatorConfig(tenants=path)).warn_if_open("127.0.0.1")
    assert not caplog.records
    AccessControl(CoordinatorConfig(tenants=path)).warn_if_open("0.0.0.0")
    assert [record.getMessage() for record in caplog.records] == ["security.keys_in_clear"]
