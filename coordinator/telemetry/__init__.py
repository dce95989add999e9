"""Metrics, request records, spans, the request log, and signals for the autoscaler. Read `request_stats.py` first, then
`request_record.py`."""
