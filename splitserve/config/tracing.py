"""Settings of tracing: where spans go, and which requests are traced."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from splitserve.addresses import check_address
from splitserve.config.base import Option, Settings

IDLE_AUTHORITY = "without a tracing.endpoint of https"


def _checked_endpoint(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.path.strip("/") or parts.query or "@" in parts.netloc:
        raise ValueError("it is written http://HOST:PORT or https://HOST:PORT")
    check_address(parts.netloc, "tracing.endpoint")
    return f"{parts.scheme}://{parts.netloc}"


class TracingConfig(Settings):
    """Export of spans over OTLP; see docs/guides/observability.md. It needs `pip install 'splitserve[tracing]'`."""

    endpoint: (
        Annotated[str, AfterValidator(_checked_endpoint), Option(flag="tracing-endpoint", metavar="URL")]
        | None
    ) = None
    """Where spans are sent by OTLP over gRPC, for example `http://localhost:4317`; `https` encrypts. Default: nowhere,
    and nothing is traced."""
    authority: Annotated[Path | None, Option(flag="tracing-authority")] = None
    """With `https`: certificates of the authority that signed the receiver's. Default: the system's authorities."""

    @property
    def has_idle_authority(self) -> bool:
        """Whether `authority` has no effect."""
        return self.authority is not None and not (self.endpoint or "").startswith("https:")


class RequestTracingConfig(TracingConfig):
    """Export of spans, and the choice of the requests that are traced: the coordinator makes it for all processes."""

    sample_ratio: Annotated[float, Field(ge=0, le=1), Option(flag="trace-sample-ratio")] = 0.1
    """Share of requests that are traced, among those whose client has not decided it by a `traceparent`."""
    max_client_traces_per_s: Annotated[
        float, Field(ge=0, le=100_000), Option(flag="max-client-traces", metavar="NUMBER", tier="internal")
    ] = 10.0
    """Requests a second that are traced because their clients ask for it; for further ones the ratio decides."""
