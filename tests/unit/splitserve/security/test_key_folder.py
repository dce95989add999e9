"""The secrets of an installation: made once, kept, replaced only by what is given."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from coordinator.tenants.policy_file import TenantsFile
from splitserve.errors import ConfigError
from splitserve.rpc.credentials import read_token
from splitserve.security.api_keys import key_hash, make_key_folder
from tests.support.waiting import PATIENCE_S

FILES = ["api_key", "cache_salt", "cluster_token", "grafana_password", "tenants.yaml"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_everything_is_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert sorted(make_key_folder(folder)) == FILES
    made = contents(folder)
    assert sorted(made) == FILES
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o440}
    assert read_token(folder / "cluster_token") == made["cluster_token"].decode()
    assert make_key_folder(folder) == []
    assert contents(folder) == made
    another = tmp_path / "more"
    make_key_folder(another)
    assert all(contents(another)[name] != made[name] for name in FILES), "no two installations share anything"


def test_the_tenants_file_knows_the_key(tmp_path: Path) -> None:
    make_key_folder(tmp_path)
    file = TenantsFile.model_validate(yaml.safe_load((tmp_path / "tenants.yaml").read_text()))
    (tenant,) = file.tenants
    assert tenant.key_hashes == (key_hash((tmp_path / "api_key").read_text()),)
    assert tenant.admin
    assert (tmp_path / str(file.cache_salt_secret_file)).stat().st_size >= 16


def test_what_is_given_takes_the_place_of_what_was_made(tmp_path: Path) -> None:
    make_key_folder(tmp_path)
    before = contents(tmp_path)
    given = {"key": "ss-mine", "token": "a-token-of-my-own"}
    assert sorted(make_key_folder(tmp_path, **given)) == ["api_key", "cluster_token", "tenants.yaml"]
    after = contents(tmp_path)
    assert (after["api_key"], after["cluster_token"]) == (b"ss-mine", b"a-token-of-my-own")
    assert key_hash("ss-mine") in after["tenants.yaml"].decode()
    assert after["grafana_password"] == before["grafana_password"]
    assert make_key_folder(tmp_path, **given) == []
    assert make_key_folder(tmp_path) == []


def test_tenants_that_the_operator_added_stay(tmp_path: Path) -> None:
    make_key_folder(tmp_path)
    path = tmp_path / "tenants.yaml"
    path.chmod(0o640)
    text = path.read_text() + "  - name: shop\n"
    path.write_text(text)
    make_key_folder(tmp_path)
    assert path.read_text() == text


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the keys"):
        make_key_folder(tmp_path / "file")


def test_the_command_prints_no_secret(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launcher", "keys", "init", str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    assert re.search("wrote .*api_key", said)
    secrets = [(tmp_path / name).read_text() for name in ("api_key", "cluster_token", "grafana_password")]
    assert not [secret for secret in secrets if secret in said]
