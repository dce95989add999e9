"""`splitserve simulate`, of one model and of several on one budget. Read `simulate.py` first."""
