"""Several models on one inventory and one budget: who may have how much of it. Read `shared_account.py` first."""
