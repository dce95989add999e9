"""Grammars of structured output: their forms, and the processes that compile and match them.

Read `processes.py` first. Grammars come from strangers and native code compiles them, so it runs in processes that may
die.
"""
