"""OpenAI's Files and Batch APIs over a folder. Read `runner.py` first."""
