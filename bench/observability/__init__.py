"""What it costs to see what a cluster does: records, metrics, tracing, the page. Read `observation_cost.py` first."""
