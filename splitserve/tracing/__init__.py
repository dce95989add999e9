"""Traces of requests: W3C contexts, and spans exported over OTLP. Read `context.py` first."""
