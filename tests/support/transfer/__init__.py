"""Peers and transports for tests of the handoff."""
