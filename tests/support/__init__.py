"""What the integration tests share: real clusters and the leak oracle."""
