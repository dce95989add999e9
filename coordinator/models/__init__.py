"""Model names and tokenizers. Read `model_routes.py` first; `tokenizers.py` turns prompts into tokens."""
