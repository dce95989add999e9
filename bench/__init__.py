"""Measurements of splitserve: real processes on this machine, figures as tables or JSON."""
