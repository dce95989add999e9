"""The `splitserve` program: collects the commands and turns every error into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

# gRPC reads this once, at its import. What goes wrong comes as errors; its own log would only add noise.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import typer
from typer.exceptions import TyperException

from splitserve import __version__
from splitserve.cli import generate, model, services, status, up
from splitserve.errors import InvalidArgumentError, SplitserveError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
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
        print(f"splitserve {__version__}")
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
model.register(app)
services.register(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 failure, 2 wrong usage, 130 Ctrl-C, 141 broken pipe."""
    try:
        result = app(args=arguments, standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads any more. Python would complain once again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except TyperException as error:
        return _complain(error.format_message(), error.exit_code)
    except (Exception, ExceptionGroup) as error:
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
