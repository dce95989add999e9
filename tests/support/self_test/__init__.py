"""Stand-ins for what the self-test of a device checks."""
