"""`splitserve explain`: what happened to one request, and which requests were slow or failed."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from splitserve.cli import options
from splitserve.cli.client.waterfall import Line, record_lines, summary_lines
from splitserve.cli.output import write
from splitserve.errors import InvalidArgumentError, NotFoundError, SplitserveError
from splitserve.rpc.documents import document

if TYPE_CHECKING:
    from splitserve.client import AsyncClient
    from splitserve.v1 import records_pb2

PIPED_WIDTH, LEAST_WIDTH, MOST_WIDTH = 80, 60, 120
LIMIT = 20
MAX_LIMIT = 1000

T = TypeVar("T")
RequestId = Annotated[
    str | None,
    typer.Argument(help="Id of the request, or of an OpenAI answer. Without it: a list of kept records."),
]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        envvar="SPLITSERVE_TARGET",
        metavar="HOST:PORT",
        help="Coordinator; give it again, or commas, for each of several: each knows its own requests. "
        "Default: 127.0.0.1:50051.",
    ),
]
Slow = Annotated[bool, typer.Option("--slow", help="List those kept because they were slow.")]
Failed = Annotated[
    bool, typer.Option("--failed", help="List those kept because they failed, were refused or resumed.")
]
Limit = Annotated[int, typer.Option(min=1, max=MAX_LIMIT, help="Records in a list, at most.")]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("explain")(explain)


def explain(
    request_id: RequestId = None,
    slow: Slow = False,
    failed: Failed = False,
    limit: Limit = LIMIT,
    target: Targets = None,
    as_json: options.AsJson = False,
    api_key: options.ApiKey = None,
    tls: options.TlsClient = None,
) -> None:
    """Show what happened to one request, and why; list slow and failed ones."""
    if request_id is not None and (slow or failed):
        raise InvalidArgumentError("request_id must not be given with --slow or --failed", field="request_id")
    targets = addresses(target)
    if request_id is not None:
        record = asyncio.run(_record(targets, request_id, api_key, tls))
        _show(document(record), record_lines(record, _width()), as_json=as_json)
        return
    found = asyncio.run(_records(targets, slow=slow, failed=failed, limit=limit, api_key=api_key, tls=tls))
    _show({"requests": [document(one) for one in found]}, summary_lines(found, _width()), as_json=as_json)


def addresses(targets: Sequence[str] | None) -> list[str]:
    """What `--target` names, each option one address or several with commas; the default without any."""
    return [one for given in targets or [options.DEFAULT_TARGET] for one in given.split(",")]


async def _record(
    targets: Sequence[str], request_id: str, api_key: str | None, tls: Path | None
) -> records_pb2.RequestRecord:
    """The latest record of that id that any of the coordinators has."""
    answers = await _each(targets, lambda client: client.request_record(request_id), api_key, tls)
    found = [answer for answer in answers if not isinstance(answer, SplitserveError)]
    if found:
        return max(found, key=lambda record: record.received.ToNanoseconds())
    errors = [answer for answer in answers if isinstance(answer, SplitserveError)]
    raise next((error for error in errors if not isinstance(error, NotFoundError)), errors[0])


async def _records(
    targets: Sequence[str], *, slow: bool, failed: bool, limit: int, api_key: str | None, tls: Path | None
) -> list[records_pb2.RequestSummary]:
    """The latest of all coordinators."""
    answers = await _each(
        targets, lambda client: client.request_records(slow=slow, failed=failed, limit=limit), api_key, tls
    )
    found: list[records_pb2.RequestSummary] = []
    for answer in answers:
        if isinstance(answer, SplitserveError):
            raise answer
        found += answer
    return sorted(found, key=lambda one: one.received.ToNanoseconds(), reverse=True)[:limit]


async def _each(
    targets: Sequence[str],
    ask: Callable[[AsyncClient], Awaitable[T]],
    api_key: str | None,
    tls: Path | None,
) -> list[T | SplitserveError]:
    from splitserve.client import AsyncClient
    from splitserve.security.tls import client_files

    files = client_files(tls) if tls else None

    async def one(target: str) -> T | SplitserveError:
        async with AsyncClient(target, api_key=api_key, tls=files) as client:
            try:
                return await ask(client)
            except SplitserveError as error:
                return error

    return await asyncio.gather(*map(one, targets))


def _width() -> int:
    if not sys.stdout.isatty():
        return PIPED_WIDTH
    return min(max(shutil.get_terminal_size().columns, LEAST_WIDTH), MOST_WIDTH)


def _show(shown: dict[str, Any], lines: Sequence[Line], *, as_json: bool) -> None:
    if as_json:
        write(json.dumps(shown, ensure_ascii=False) + "\n")
    elif not sys.stdout.isatty():
        write("".join(f"{line.text}\n" for line in lines))
    else:
        # Imported here: it takes time, and only a terminal gets colors. It heeds NO_COLOR.
        from rich.console import Console
        from rich.text import Text

        console = Console(soft_wrap=True)
        with console.capture() as capture:
            for line in lines:
                console.print(Text(line.text, line.style), highlight=False)
        write(capture.get())
