"""The gRPC services of a coordinator, by name, and their registration on a server."""

from __future__ import annotations

import grpc

from splitserve.kserve import open_inference_pb2
from splitserve.kserve.open_inference_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)
from splitserve.v1 import inference_pb2, registry_pb2, routes_pb2, scaling_pb2
from splitserve.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server
from splitserve.v1.registry_pb2_grpc import RegistryServiceServicer, add_RegistryServiceServicer_to_server
from splitserve.v1.routes_pb2_grpc import RoutesServiceServicer, add_RoutesServiceServicer_to_server
from splitserve.v1.scaling_pb2_grpc import ScalingServiceServicer, add_ScalingServiceServicer_to_server

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    registry_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name,
    scaling_pb2.DESCRIPTOR.services_by_name["ScalingService"].full_name,
    routes_pb2.DESCRIPTOR.services_by_name["RoutesService"].full_name,
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name,
)


def add_services(
    server: grpc.aio.Server,
    inference: InferenceServiceServicer,
    kserve: GRPCInferenceServiceServicer,
    routes: RoutesServiceServicer,
    registry: RegistryServiceServicer,
    scaling: ScalingServiceServicer,
) -> None:
    """Registers the servicers of all services."""
    add_InferenceServiceServicer_to_server(inference, server)
    add_GRPCInferenceServiceServicer_to_server(kserve, server)
    add_RoutesServiceServicer_to_server(routes, server)
    add_RegistryServiceServicer_to_server(registry, server)
    add_ScalingServiceServicer_to_server(scaling, server)
