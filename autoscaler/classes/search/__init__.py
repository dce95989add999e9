"""The search for the cheapest mix of classes, of one side or of both sides of neutral workers. Read `mix_search.py` first."""
