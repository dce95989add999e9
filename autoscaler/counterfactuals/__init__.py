"""What other policies would have made of the traffic that came. Read `recorded_window.py` first."""
