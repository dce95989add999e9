"""How long a start takes, by phases. Read `starts.py` first."""
