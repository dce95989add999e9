"""Reads options with vLLM's own parser. What it refuses is one sentence, and nothing is printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from engine.vllm.command_line.options import FIELD, require_own
from engine.vllm.command_line.refusals import plain, reason_of
from splitserve.errors import ConfigError


class OptionParser(FlexibleArgumentParser):
    """Takes names in full only, and raises ConfigError (field `engine.engine_args`) where vLLM's ends the process."""

    def __init__(self) -> None:
        super().__init__(prog="--engine-args", add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Called for all that is wrong with an option."""
        raise ConfigError(f"{FIELD}: {plain(message)}", field=FIELD)


def read_options(own: Sequence[str], given: Sequence[str]) -> Any:
    """vLLM's `EngineArgs` of what the settings say and of the user's options, which come last.

    Raises ConfigError (field `engine.engine_args`) for an unknown or refused option and for a wrong value.
    """
    parser = EngineArgs.add_cli_args(OptionParser())
    settings, parsed = parser.parse_args(list(own)), parser.parse_args([*own, *given])
    require_own(vars(settings), vars(parsed))
    try:
        return EngineArgs.from_cli_args(parsed)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{FIELD}: {reason_of(error)}", field=FIELD) from error
