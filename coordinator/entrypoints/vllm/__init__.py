"""vLLM's gRPC contract, for gateways and tools that speak to vLLM. Read `service.py` first."""
