"""What the engine does differently on a CUDA device; the kernels are imported there only (`engine.forward` decides).

Read `paged_forward.py` first: one step from scheduled sequences to logits.
"""
