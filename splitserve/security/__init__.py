"""TLS, certificates and API keys. Read `tls.py` first."""
