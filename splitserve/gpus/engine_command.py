"""Which engine a worker's command line chooses, for those who start workers that were configured elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from splitserve.config.command_line import settings_of
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from splitserve.gpus.option_words import value_given
from splitserve.gpus.worker_gpus import check_gpu_count

_KIND, _ENGINE_ARGS = "engine.kind", "engine.engine_args"
_SETTINGS = {setting.path: setting for setting in settings_of(WorkerConfig)}
GPU_VARIABLE = _SETTINGS["gpus"].variable
"""The environment variable of a worker's setting `gpus`."""


def check_command(words: Sequence[str], environment: Mapping[str, str], gpus: int) -> None:
    """Raises ConfigError (field `gpus_per_replica`) if the engine that a worker's command line and environment choose
    cannot use so many GPUs. What stands in a `--config` file is not seen."""
    kind = _value(_KIND, words, environment) or EngineConfig().kind
    check_gpu_count(kind, _value(_ENGINE_ARGS, words, environment) or "", gpus)


def environment_of(entries: Iterable[str]) -> dict[str, str]:
    """Variables as a mapping, of "NAME=value" entries."""
    return {name: value for name, mark, value in (entry.partition("=") for entry in entries) if mark}


def _value(path: str, words: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """A setting's last value on the command line, else its variable's."""
    setting = _SETTINGS[path]
    value = value_given(words, (setting.flag,))
    return value if value is not None else environment.get(setting.variable)
