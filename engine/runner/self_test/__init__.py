"""The engine's self-test on a device, and what is switched off when a part of it fails. Read `verdict.py` first."""
