"""Policies that decide beside the one in force. Read `shadow.py` first."""
