"""What every part of splitserve shares: wire contract, client, CLI, configuration, errors, RPC plumbing."""

__version__ = "0.1.0"
