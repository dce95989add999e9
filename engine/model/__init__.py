"""Makes models of `transformers` usable by the engine. Read `attention_interface.py` first: the hook into them."""
