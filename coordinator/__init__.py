"""The front door: registry, routing and the life of a request."""
