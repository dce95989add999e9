"""A client of a cloud's metadata server. What it answers is checked for size and form: anything may listen there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx2

from splitserve.errors import InvalidArgumentError, UnavailableError

TIMEOUT_S = 1.0
"""Of a whole request. The servers are on the machine itself."""
MAX_BODY_BYTES = 64 * 1024


class MetadataServer:
    """One server, asked over plain HTTP and never through a proxy. Redirects are not followed."""

    def __init__(self, url: str) -> None:
        self._client = httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False)

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str]
    ) -> tuple[int, str, httpx2.Headers]:
        """Status, text and headers of the answer.

        Raises UnavailableError if none comes in time or it says that the server is overloaded or broken, and
        InvalidArgumentError if it is too long or no text.
        """
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                self._client.stream(method, path, headers=dict(headers)) as response,
            ):
                if response.status_code == httpx2.codes.TOO_MANY_REQUESTS or response.is_server_error:
                    message = f"the metadata server answers {response.status_code}"
                    raise UnavailableError(message, reason="METADATA_UNAVAILABLE")
                body = bytearray()
                async for part in response.aiter_raw():
                    body += part
                    if len(body) > MAX_BODY_BYTES:
                        raise malformed(f"its answer is longer than {MAX_BODY_BYTES} bytes")
                return response.status_code, body.decode(), response.headers
        except UnicodeDecodeError:
            raise malformed("its answer is no text") from None
        except (httpx2.HTTPError, TimeoutError, OSError) as error:
            message = f"the metadata server does not answer: {type(error).__name__}"
            raise UnavailableError(message, reason="METADATA_UNAVAILABLE") from None

    async def close(self) -> None:
        """Closes the connection."""
        await self._client.aclose()


def malformed(what: str) -> InvalidArgumentError:
    """What is raised for an answer that is none."""
    return InvalidArgumentError(f"the metadata server: {what}", reason="METADATA_MALFORMED")
