"""What the coordinator tells about its requests and itself: metrics, request records, spans, the request log, signals
for the autoscaler. Read `request_stats.py` first, then `request_record.py`."""
