"""The engine's self-test on a device; what fails is switched off. Read `device_checks.py` first."""
