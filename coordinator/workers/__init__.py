"""The workers that registered. Read `registry.py` first; `client.py` calls them."""
