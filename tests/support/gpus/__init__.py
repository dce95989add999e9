"""Machines with GPUs that there are not: an NVML library, and trees of the kernel's files."""
