"""Engines that `bench.engine` times: each a process that answers questions on its standard streams."""
