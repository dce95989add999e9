"""The APIs for clients. Read `inference_api.py` first: all of them call it."""
