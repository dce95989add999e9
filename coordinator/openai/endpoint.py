"""The frame around every endpoint: who asks, what goes wrong, under which id."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from coordinator.caller import Caller
from coordinator.front_door import FrontDoor
from coordinator.openai.errors import NO_NAMES, FieldNames, HttpRefusal, error_answer
from coordinator.openai.exchange import JSON_TYPE, ClientGoneError, Exchange
from coordinator.random_pool import random_hex
from coordinator.request_validation import REQUEST_ID

CHOICE_DIGITS = 5


class Call:
    """One call of an endpoint."""

    def __init__(self, exchange: Exchange, path_params: dict[str, str]) -> None:
        self.exchange = exchange
        self.path_params = path_params
        self.names: FieldNames = NO_NAMES
        """Set once the request has been read."""
        wanted = exchange.header(b"x-request-id") or ""
        # Room is left for the number of a choice.
        fits = len(wanted) < 128 - CHOICE_DIGITS and REQUEST_ID.match(wanted)
        self.request_id = wanted if fits else random_hex()
        exchange.answer_headers.append((b"x-request-id", self.request_id.encode()))


Serve = Callable[[Call], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An ASGI application that lets `serve` answer one call and answers errors itself."""

    serve: Serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        exchange = Exchange(scope, receive, send)
        call = Call(exchange, scope.get("path_params", {}))
        try:
            await self.serve(call)
        except ClientGoneError:
            return
        except Exception as error:
            await _fail(call, error)


class Desk:
    """What the endpoints of one coordinator share."""

    def __init__(self, door: FrontDoor, max_body_bytes: int) -> None:
        self.door = door
        self._max_body_bytes = max_body_bytes

    def caller(self, call: Call) -> Caller:
        """Who calls. Raises UnauthenticatedError."""
        return self.door.authenticator.caller(call.exchange.credential)

    async def json_body(self, call: Call) -> bytes:
        """The body of a POST. Raises HttpRefusal unless it says that it is JSON: what forms of foreign web pages can
        send without being asked is none."""
        kind = (call.exchange.header(b"content-type") or "").partition(";")[0].strip().lower()
        body = await call.exchange.body(self._max_body_bytes)
        if kind.encode() != JSON_TYPE:
            raise HttpRefusal(415, "content-type must be application/json", "UNSUPPORTED_MEDIA_TYPE")
        return body


async def _fail(call: Call, error: Exception) -> None:
    answer = error_answer(error, call.names)
    exchange = call.exchange
    if exchange.started:
        await exchange.fail_events(b"data: %s\n\n" % answer.body)
        return
    exchange.answer_headers.extend(answer.headers)
    await exchange.respond(answer.status, answer.body)
