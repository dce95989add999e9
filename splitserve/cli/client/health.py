"""`splitserve health`: one call to the standard gRPC health service, for container health checks."""

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
    tls: options.TlsClient = None,
    role: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE", help="With --tls: verify this role in the certificate instead of the host's name."
        ),
    ] = None,
) -> None:
    """Exit 0 if the service at --target serves; a coordinator or a worker."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from splitserve.errors import InvalidArgumentError, UnavailableError
    from splitserve.rpc.channel import channel_options
    from splitserve.security.tls import ROLES, channel_credentials, client_files, read_pems, role_name

    peers = [known for known in ROLES if known == role]
    if role is not None and not peers:
        raise InvalidArgumentError(f"role must be one of {', '.join(ROLES)}", field="role")
    settings = channel_options()
    settings += [("grpc.ssl_target_name_override", role_name(peer)) for peer in peers]
    if tls is None:
        connection = grpc.insecure_channel(target, options=settings)
    else:
        pems = read_pems(client_files(tls))
        connection = grpc.secure_channel(target, channel_credentials(pems), options=settings)
    with connection as channel:
        try:
            check: Any = health_pb2_grpc.HealthStub(channel)
            answer = check.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise UnavailableError(f"{target} does not answer ({error.code().name})") from None
    word = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise UnavailableError(f"{target}: {word}")
    write(f"{target}: {word}\n")
