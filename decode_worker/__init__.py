"""Reserved KV in, token stream out."""
