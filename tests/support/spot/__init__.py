"""A stand-in for the metadata servers of clouds, and the sources of spot notices that ask it."""
