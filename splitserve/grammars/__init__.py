"""Grammars of structured output: their forms, and the processes that compile and match them.

Read `processes.py` first. Native code compiles what strangers send; here it runs in processes that may die.
"""
