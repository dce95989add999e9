"""Requests and clients for tests of the coordinator."""
