"""The search for the cheapest mix of classes, on one side or both of neutral workers. Read `mix_search.py` first."""
