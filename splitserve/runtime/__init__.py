"""What long-running processes share: signals and limits, background loops, reloaded files, work beside the event loop.

Read `process.py` first.
"""
