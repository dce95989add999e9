"""Services forked from a process that has their code. Read `services.py` first."""
