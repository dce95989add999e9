"""What drafts save: `python -m bench.engine.speculation`."""
