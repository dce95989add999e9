"""What vLLM is told: the options of a worker's settings and the user's own. Read `options.py` first."""
