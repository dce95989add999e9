"""Real and scripted clusters for tests. Read `real_cluster.py` first."""
