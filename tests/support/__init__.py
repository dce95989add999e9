"""What tests share: real clusters, stand-ins that behave like the real thing, and the leak oracle."""
