"""`splitserve health`: one call to the standard gRPC health service, for container health checks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.cli import options
from launcher.cli.output import write

if TYPE_CHECKING:
    from splitserve.security.tls import Role, TlsFiles


def health(
    target: options.Target = options.DEFAULT_TARGET,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for the answer.")] = 3.0,
    tls: options.TlsClient = None,
    role: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE", help="With --tls: verify this role in the certificate instead of the host's name."
        ),
    ] = None,
) -> None:
    """Exit 0 if the service at --target serves; a coordinator or a worker."""
    from splitserve.errors import InvalidArgumentError
    from splitserve.security.tls import ROLES, client_files

    peer = next((known for known in ROLES if known == role), None)
    if role is not None and peer is None:
        raise InvalidArgumentError(f"role must be one of {', '.join(ROLES)}", field="role")
    asyncio.run(_check(target, timeout, client_files(tls) if tls else None, peer))
    write(f"{target}: SERVING\n")


async def _check(target: str, timeout_s: float, tls: TlsFiles | None, peer: Role | None) -> None:
    """Raises UnavailableError unless the service says within `timeout_s` that it serves."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from splitserve.errors import UnavailableError
    from splitserve.rpc.channel import make_channel

    async with make_channel(target, tls=tls, peer=peer) as channel:
        try:
            check: Any = health_pb2_grpc.HealthStub(channel)
            answer = await check.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"{target} does not answer ({error.code().name})") from None
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        word = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise UnavailableError(f"{target}: {word}")
