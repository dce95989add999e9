"""Programs and libraries of the system that tests need."""
