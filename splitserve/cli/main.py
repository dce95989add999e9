"""The `splitserve` program: collects the commands and turns every error into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

# gRPC reads this once, at its import. What goes wrong comes as errors; its own log would only add noise.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import typer
from typer.exceptions import TyperException

from splitserve import __version__
from splitserve.cli import (
    certs,
    doctor,
    generate,
    health,
    keys,
    model,
    routes,
    services,
    simulate,
    status,
    up,
)
from splitserve.cli.output import write
from splitserve.errors import InvalidArgumentError, SplitserveError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EPILOG = (
    "Exit codes: 0 success; 1 failure; 2 wrong command line, setting or request; 130 interrupted; "
    "141 the reader of the output went away. Errors are one line on stderr."
)

app = typer.Typer(
    name="splitserve",
    help="LLM serving with prefill and decode split into separate pools.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
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


up.register(app)
generate.register(app)
status.register(app)
doctor.register(app)
health.register(app)
model.register(app)
routes.register(app)
certs.register(app)
keys.register(app)
services.register(app)
simulate.register(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    return exit_code_of(lambda: app(args=arguments, standalone_mode=False))


def exit_code_of(action: Callable[[], object]) -> int:
    """Runs something: what it returns if that is a number, else 0, or the code of its error, which is told.

    1 failure, 2 wrong usage, 130 Ctrl-C; the code of `typer.Exit` comes as a number from the command itself.
    """
    try:
        result = action()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except TyperException as error:
        # Without a message the help was shown instead.
        message = error.format_message()
        return _complain(message, error.exit_code) if message else EXIT_USAGE
    except Exception as error:
        return _explain(error)
    return result if isinstance(result, int) else 0


def _explain(error: Exception) -> int:
    # Imported here: it is needed on failure only.
    from splitserve.rpc_errors import known_error

    known = known_error(error)
    if known is None:
        return _complain(f"unexpected {type(error).__name__}: {error}", EXIT_FAILED)
    return _complain(_with_retry_hint(known), EXIT_USAGE if _is_usage(known) else EXIT_FAILED)


def _is_usage(error: SplitserveError) -> bool:
    return isinstance(error, InvalidArgumentError)


def _with_retry_hint(error: SplitserveError) -> str:
    hint = f" (try again in {error.retry_after_s:g} s)" if error.retry_after_s is not None else ""
    return f"{error.message}{hint}"


def _complain(message: str, code: int) -> int:
    # One line, whatever the message holds: log readers and people count on it.
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code
