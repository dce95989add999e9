"""Transports move bytes between workers. Read `transport.py` first, the interface; `factory.py` creates them."""
