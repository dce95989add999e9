"""Who may have how much of what several models share, by what all of them have and claim. Read `shares.py` first."""
