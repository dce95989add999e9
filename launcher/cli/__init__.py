"""The command line. Read `main.py` first; each file holds a group of commands.

Commands import what they need when they run, so that `--help` and `generate` start quickly.
"""
