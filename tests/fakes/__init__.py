"""Stand-ins for parts of the system, for tests."""
