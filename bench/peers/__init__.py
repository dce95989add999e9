"""Other serving systems, measured beside splitserve. Each has its own environment."""
