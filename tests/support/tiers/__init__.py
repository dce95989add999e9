"""An engine over tiers, and stores that fail."""
