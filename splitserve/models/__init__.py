"""Where models and tokenizers come from. Read `sources.py` first."""
