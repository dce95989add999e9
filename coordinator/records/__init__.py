"""One record of each request, for people who ask what happened to it. Read `request_record.py` first."""
