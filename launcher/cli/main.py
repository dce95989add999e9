"""The `splitserve` program: runs a command and turns every error into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

# gRPC reads this once, on import. Failures surface as errors; its own log only adds noise.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import typer
from typer.exceptions import TyperException

from launcher.cli.commands import CommandGroup
from launcher.cli.output import write
from launcher.cli.own_packages import foreign_package
from splitserve import __version__

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
    if problem := foreign_package():
        return _complain(problem, EXIT_FAILED)
    code = exit_code_of(lambda: app(args=given or ["--help"], standalone_mode=False))
    return code if given else EXIT_USAGE


def exit_code_of(action: Callable[[], object]) -> int:
    """Runs a callable, prints its error if it raises one, and returns the exit code: the callable's result if that is
    a number, as for `typer.Exit`; else 0, or 1 for a failure, 2 for wrong usage, 130 for Ctrl-C."""
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
    # Imported here: only failures need them, and they import gRPC.
    from splitserve.errors import InvalidArgumentError
    from splitserve.rpc.status import known_error

    known = known_error(error)
    if known is None:
        return _complain(f"unexpected {type(error).__name__}: {error}", EXIT_FAILED)
    hint = "" if known.retry_after_s is None else f" (try again in {known.retry_after_s:g} s)"
    code = EXIT_USAGE if isinstance(known, InvalidArgumentError) else EXIT_FAILED
    return _complain(f"{known.message}{hint}", code)


def _complain(message: str, code: int) -> int:
    """Writes one short line to stderr, whatever a message quotes: scripts that read logs rely on it. Returns `code`."""
    line = " ".join(message[: 2 * MAX_ERROR_CHARACTERS].split())
    if len(line) > MAX_ERROR_CHARACTERS:
        line = f"{line[:MAX_ERROR_CHARACTERS]}…"
    print(f"error: {line}", file=sys.stderr, flush=True)
    return code
