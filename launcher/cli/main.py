"""The `splitserve` program: runs a command and turns every error into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

# gRPC reads this once, on import. Failures surface as errors; its own log only adds noise.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import typer
from typer.exceptions import TyperException

from launcher.cli.commands import CommandGroup
from launcher.cli.output import write
from splitserve import __version__

if TYPE_CHECKING:
    from splitserve.errors import SplitserveError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
MAX_ERROR_CHARACTERS = 2000
EPILOG = (
    "Exit codes: 0 success; 1 failure; 2 wrong command line, setting or request; 130 interrupted; "
    "141 the reader of the output went away. Errors are one line on stderr."
)

app = typer.Typer(
    name="splitserve",
    cls=CommandGroup,
    help="LLM serving with prefill and decode split into separate pools.",
    epilog=EPILOG,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        write(f"splitserve {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version.")
    ] = False,
) -> None:
    """LLM serving with prefill and decode split into separate pools."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Without a command: the help, and the code of wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    code = exit_code_of(lambda: app(args=given or ["--help"], standalone_mode=False))
    return code if given else EXIT_USAGE


def exit_code_of(action: Callable[[], object]) -> int:
    """Runs a callable and returns its exit code: its result if that is a number, else 0; the code of its printed error.

    1 failure, 2 wrong usage, 130 Ctrl-C; the code of `typer.Exit` comes as a number from the command itself.
    """
    try:
        result = action()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except TyperException as error:
        # No message: the help was shown instead.
        message = error.format_message()
        return _complain(message, error.exit_code) if message else EXIT_USAGE
    except Exception as error:
        return explain(error)
    return result if isinstance(result, int) else 0


def explain(error: Exception) -> int:
    """Writes an error to stderr in one line; returns the exit code."""
    # Imported here: needed on failure only, and gRPC comes with them.
    from splitserve.errors import InvalidArgumentError
    from splitserve.rpc.status import known_error

    known = known_error(error)
    if known is None:
        return _complain(f"unexpected {type(error).__name__}: {error}", EXIT_FAILED)
    code = EXIT_USAGE if isinstance(known, InvalidArgumentError) else EXIT_FAILED
    return _complain(_with_retry_hint(known), code)


def _with_retry_hint(error: SplitserveError) -> str:
    hint = f" (try again in {error.retry_after_s:g} s)" if error.retry_after_s is not None else ""
    return f"{error.message}{hint}"


def _complain(message: str, code: int) -> int:
    # Always one line, and a short one: scripts that read logs rely on it, and a message may quote what somebody wrote.
    line = " ".join(message[: 2 * MAX_ERROR_CHARACTERS].split())
    if len(line) > MAX_ERROR_CHARACTERS:
        line = f"{line[:MAX_ERROR_CHARACTERS]}…"
    print(f"error: {line}", file=sys.stderr, flush=True)
    return code
