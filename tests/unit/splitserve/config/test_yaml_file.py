"""YAML files: what is wrong with them is named with its line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from splitserve.config.yaml_file import read_yaml_file
from splitserve.errors import ConfigError
from splitserve.runtime import bounded_file
from splitserve.runtime.bounded_file import SMALL_FILE_BYTES


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", "line 3"),
        ("a: 1\n\tb: 2\n", "line 2"),
        ("a: 1\nname: 2026-02-30\n", "line 2: not valid YAML: day is out of range for month"),
        ("a: 1\nb: 2026-01-01T25:00:00\n", "line 2"),
        ("a: 1\nb: " + "9" * 5000 + "\n", "line 2"),
        ("a: 1\nb: !!python/object:os.system {}\n", "line 2"),
        ("a: 1\n? [1, 2]\n: 3\n", "line 2"),
        ("a: 1\nb: *unknown\n", "line 2"),
        ("a: 1\nb: 2\na: 3\n", "line 3: not valid YAML: the key 'a' is there already, in line 1"),
        ("t:\n- {a: 1, b: 2}\n- {a: 1, b: 2, 'b': 3}\n", "line 3: not valid YAML: the key 'b'"),
        ("- a\n", "must hold a mapping"),
        ("a: " + "[" * 5000, "not valid YAML"),
        ("a: \x00", "not valid YAML"),
    ],
)
def test_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml_file(path)
    assert said in caught.value.message
    assert str(path) in caught.value.message


def test_what_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            read_yaml_file(path)
    (tmp_path / "bytes").write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match="no UTF-8 text, at byte 3"):
        read_yaml_file(tmp_path / "bytes")


def test_merged_keys_are_no_doubled_ones(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("one: &one {a: 1, b: 2}\ntwo: &two {<<: *one, b: 3}\nthree: {<<: [*two, *one], b: 4}\n")
    assert read_yaml_file(path).values["three"] == {"a": 1, "b": 4}
    path.write_text("one: &one {a: 1}\ntwo: &two {b: 2}\nthree:\n  <<: *one\n  <<: *two\n  c: 3\n")
    assert read_yaml_file(path).values["three"] == {"a": 1, "b": 2, "c": 3}


def test_bounds_may_be_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("a: 1234")
    with pytest.raises(ConfigError, match="more than 6 bytes"):
        read_yaml_file(tmp_path / "a", most_bytes=6)
    os.mkfifo(tmp_path / "b")
    monkeypatch.setattr(bounded_file, "PIPE_SILENCE_S", 0.05)
    with pytest.raises(ConfigError, match="nobody writes to the pipe"):
        read_yaml_file(tmp_path / "b")


def test_neither_a_huge_file_nor_a_device_is_read(tmp_path: Path) -> None:
    (tmp_path / "huge").write_text("#" * (SMALL_FILE_BYTES + 1))
    for path, why in ((tmp_path / "huge", "more than 4194304 bytes"), (Path("/dev/zero"), "neither a file")):
        with pytest.raises(ConfigError, match=why) as caught:
            read_yaml_file(path)
        assert caught.value.field == "config"


def test_fields_have_lines(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("tenants:\n- name: a\n  weight: 1\n\n- name: b\n  weight: x\nother: {deep: {er: 1}}\n")
    file = read_yaml_file(path)
    assert file.line_of("tenants") == 1
    assert file.line_of("tenants.1") == 5
    assert file.line_of("tenants.1.weight") == 6
    assert file.line_of("tenants.1.missing") == 5
    assert file.line_of("other.kind-of-a-union.deep.er") == 7
    assert file.line_of(None) == 1
    assert read_yaml_file(tmp_path / "file.yaml").values["other"] == {"deep": {"er": 1}}
    (tmp_path / "empty").write_text("")
    assert read_yaml_file(tmp_path / "empty").line_of("a") == 1
    with pytest.raises(ConfigError, match=r"file\.yaml, line 6: no number"), file.naming_lines():
        raise ConfigError("no number", field="tenants.1.weight")


def test_on_and_off_are_words_and_no_booleans(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("hybrid: off\npage: on\nyes: no\npaced: true\nkept: False\nnumber: 1\nnothing:\n")
    assert read_yaml_file(path).values == {
        "hybrid": "off",
        "page": "on",
        "yes": "no",
        "paced": True,
        "kept": False,
        "number": 1,
        "nothing": None,
    }
