"""The setting `engine.adapters`: its forms, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from splitserve.config.base import merge_settings
from splitserve.config.command_line import arguments
from splitserve.config.worker import WorkerConfig
from splitserve.errors import ConfigError


def settings(adapters: Any) -> WorkerConfig:
    return merge_settings(
        WorkerConfig, {}, {"worker_id": "w", "model": "m", "engine": {"adapters": adapters}}
    )


def test_a_mapping_in_a_file_and_options_say_the_same() -> None:
    config = settings({"red": "/adapters/red", "blue": "b=c"})
    assert config.engine.adapters == {"red": Path("/adapters/red"), "blue": Path("b=c")}
    assert arguments(config)[4:] == ["--adapter", "red=/adapters/red", "--adapter", "blue=b=c"]
    assert settings(["red=/adapters/red", "blue=b=c"]) == config
    assert settings(None).engine.adapters == {}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["red"], "NAME=FOLDER"),
        (["red="], "NAME=FOLDER"),
        (["red=a", "red=b"], "twice"),
        (["a b=c"], "names must have"),
        ({"a" * 129: "c"}, "names must have"),
        ({f"a{n}": "c" for n in range(129)}, "at most 128"),
        ("red", "valid"),
    ],
)
def test_bad_adapters_are_named(given: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        settings(given)
    assert caught.value.field == "engine.adapters"
