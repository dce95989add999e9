"""Golden prompts sent through the workers, with an alarm where an answer differs. Read `canary.py` first."""
