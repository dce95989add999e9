"""Other serving systems, measured beside splitserve. Each lives in an environment of its own."""
