"""What the engine does faster than torch on cpu: kernels in bfloat16, and tapes of steps that only decode."""
