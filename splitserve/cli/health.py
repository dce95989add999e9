"""`splitserve health`: one question to the standard gRPC health service, for health checks of containers."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from splitserve.cli import options
from splitserve.cli.output import write


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("health")(health)


def health(
    target: options.Target = options.DEFAULT_TARGET,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for the answer.")] = 3.0,
) -> None:
    """Exit 0 if the service at --target serves; a coordinator or a worker."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from splitserve.errors import UnavailableError
    from splitserve.rpc import channel_options

    with grpc.insecure_channel(target, options=channel_options()) as channel:
        try:
            check: Any = health_pb2_grpc.HealthStub(channel)
            answer = check.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise UnavailableError(f"{target} does not answer ({error.code().name})") from None
    word = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise UnavailableError(f"{target}: {word}")
    write(f"{target}: {word}\n")
