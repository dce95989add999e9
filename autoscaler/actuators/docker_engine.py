"""Calls to one Docker Engine: off the event loop, one at a time, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeVar

from docker import APIClient
from docker.errors import APIError, DockerException
from docker.utils import kwargs_from_env
from requests.exceptions import RequestException

from splitserve.errors import DeadlineExceededError, UnavailableError
from splitserve.runtime.call_thread import CallThread

T = TypeVar("T")

CLOSE_S = 5.0
"""How long the end of the process waits for a call under way, which is a few short requests."""

UNREACHABLE = "DOCKER_UNREACHABLE"
"""The Engine gave no answer. Whether it carried out the request is unknown."""


def engine_of_environment(timeout_s: float) -> APIClient:
    """The Engine that DOCKER_HOST names, by default the one behind /var/run/docker.sock."""
    return APIClient(version="auto", timeout=round(timeout_s), **kwargs_from_env())


@contextmanager
def may_be_gone() -> Iterator[None]:
    """Ignores errors of a container that has ended or was removed meanwhile."""
    try:
        yield
    except APIError as error:
        if error.status_code not in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
            raise


def last_lines(client: APIClient, container: str, lines: int) -> str:
    """The end of a container's log; a note where the container's logging driver cannot be read."""
    try:
        return client.logs(container, tail=lines).decode(errors="replace")
    except APIError as error:
        return f"(not readable: {error.explanation})"


@dataclass(eq=False)
class DockerEngine:
    """One Docker Engine, by default the one of the environment.

    One thread runs all calls in order: a call whose caller has given up still ends before the next one starts. So calls
    never interleave. After a lost connection the next call opens a new one.
    """

    request_timeout_s: float = 10.0
    deadline_s: float = 25.0
    """For one call, which may be several requests."""
    connect: Callable[[float], APIClient] = engine_of_environment
    """Connects to the Engine; takes the timeout of one request in seconds."""
    let_go: Callable[[], None] = lambda: None
    """Ends what `connect` began."""
    _thread: CallThread = field(default_factory=lambda: CallThread("docker"))
    _client: APIClient | None = None

    async def call(self, what: str, work: Callable[[APIClient], T]) -> T:
        """The result of `work`, which may be several requests.

        Raises UnavailableError with the Engine's error (DOCKER) or because the Engine did not answer
        (DOCKER_UNREACHABLE), or DeadlineExceededError. A SplitserveError of `work` is passed on.
        """
        try:
            async with asyncio.timeout(self.deadline_s):
                return await self._thread.call(lambda: self._run(what, work))
        except TimeoutError:
            message = f"docker: {what}: no answer within {self.deadline_s:g} s"
            raise DeadlineExceededError(message) from None

    async def close(self) -> None:
        """Closes the connection. Queued calls are cancelled; a call under way has CLOSE_S seconds to end."""
        await self._thread.close(CLOSE_S)
        await asyncio.to_thread(self.let_go)

    def _run(self, what: str, work: Callable[[APIClient], T]) -> T:
        try:
            if self._client is None:
                self._client = self.connect(self.request_timeout_s)
            return work(self._client)
        except APIError as error:
            raise UnavailableError(f"docker: {what}: {error}", reason="DOCKER") from error
        except (DockerException, RequestException, OSError) as error:
            self._client = None
            raise UnavailableError(f"docker: {what}: {error}", reason=UNREACHABLE) from error
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            # Something else than a Docker Engine answered. The control loop and the other hosts go on.
            self._client = None
            message = f"docker: {what}: not an answer of a Docker Engine: {error!r}"
            raise UnavailableError(message, reason=UNREACHABLE) from error
