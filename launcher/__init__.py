"""The roof, the command line and `splitserve up`. It alone imports all others. Read `cli/main.py` first."""
