"""The command line: one file for each group of commands.

Commands import what they need when they run, so that `--help` and `generate` start quickly.
"""
