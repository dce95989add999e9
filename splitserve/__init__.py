"""Shared by all components: wire contract, client, CLI, configuration, errors, gRPC plumbing."""

__version__ = "0.1.0"
