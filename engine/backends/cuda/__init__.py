"""The CUDA backend; imported on CUDA devices only. Read `forward.py` first: one step, from sequences to logits."""
