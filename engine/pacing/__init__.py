"""What steps take, and when tokens are due: pure, time is an argument. Read `token_clock.py` first."""
