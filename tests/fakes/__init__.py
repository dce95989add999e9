"""Stand-ins that behave like the real thing, only smaller."""
