"""`splitserve explain`: what happened to one request, and which requests were slow or failed."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from launcher.cli import options
from launcher.cli.client.waterfall import Line, record_lines, summary_lines
from launcher.cli.output import drawn, write, write_json
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
Slow = Annotated[bool, typer.Option("--slow", help="List records kept because they were slow.")]
Failed = Annotated[
    bool, typer.Option("--failed", help="List records kept because they failed, were refused or resumed.")
]
Limit = Annotated[int, typer.Option(min=1, max=MAX_LIMIT, help="Records in a list, at most.")]


def explain(
    request_id: RequestId = None,
    slow: Slow = False,
    failed: Failed = False,
    limit: Limit = LIMIT,
    target: options.Targets = None,
    as_json: options.AsJson = False,
    api_key: options.ApiKey = None,
    tls: options.TlsClient = None,
) -> None:
    """Show what happened to one request, and why; list slow and failed ones."""
    if request_id is not None and (slow or failed):
        raise InvalidArgumentError("request_id must not be given with --slow or --failed", field="request_id")
    targets = options.addresses(target)
    if request_id is not None:
        record = asyncio.run(_record(targets, request_id, api_key, tls))
        _show(document(record), record_lines(record, _width()), as_json=as_json)
        return
    summaries = asyncio.run(
        _records(targets, slow=slow, failed=failed, limit=limit, api_key=api_key, tls=tls)
    )
    shown = {"requests": [document(summary) for summary in summaries]}
    _show(shown, summary_lines(summaries, _width()), as_json=as_json)


async def _record(
    targets: Sequence[str], request_id: str, api_key: str | None, tls: Path | None
) -> records_pb2.RequestRecord:
    """The latest record of that id that any of the coordinators has."""
    answers = await _ask_all(targets, lambda client: client.request_record(request_id), api_key, tls)
    records = [answer for answer in answers if not isinstance(answer, SplitserveError)]
    if records:
        return max(records, key=lambda record: record.received.ToNanoseconds())
    errors = [answer for answer in answers if isinstance(answer, SplitserveError)]
    raise next((error for error in errors if not isinstance(error, NotFoundError)), errors[0])


async def _records(
    targets: Sequence[str], *, slow: bool, failed: bool, limit: int, api_key: str | None, tls: Path | None
) -> list[records_pb2.RequestSummary]:
    """The latest records of all coordinators, at most `limit`. Raises the error of a coordinator that fails."""
    answers = await _ask_all(
        targets, lambda client: client.request_records(slow=slow, failed=failed, limit=limit), api_key, tls
    )
    summaries: list[records_pb2.RequestSummary] = []
    for answer in answers:
        if isinstance(answer, SplitserveError):
            raise answer
        summaries += answer
    return sorted(summaries, key=lambda summary: summary.received.ToNanoseconds(), reverse=True)[:limit]


async def _ask_all(
    targets: Sequence[str],
    ask: Callable[[AsyncClient], Awaitable[T]],
    api_key: str | None,
    tls: Path | None,
) -> list[T | SplitserveError]:
    """The answer or the error of each coordinator, in the order of `targets`."""

    async def answer_of(target: str) -> T | SplitserveError:
        async with options.client(target, api_key, tls) as client:
            try:
                return await ask(client)
            except SplitserveError as error:
                return error

    return await asyncio.gather(*map(answer_of, targets))


def _width() -> int:
    if not sys.stdout.isatty():
        return PIPED_WIDTH
    return min(max(shutil.get_terminal_size().columns, LEAST_WIDTH), MOST_WIDTH)


def _show(shown: dict[str, Any], lines: Sequence[Line], *, as_json: bool) -> None:
    if as_json:
        write_json(shown)
    else:
        from rich.text import Text

        write(drawn(*(Text(line.text, line.style) for line in lines)))
