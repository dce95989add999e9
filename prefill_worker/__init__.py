"""Prompt in, first token and pushed KV out."""
