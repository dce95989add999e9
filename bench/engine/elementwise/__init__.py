"""Steps with and without fused elementwise kernels, on a CUDA device: `python -m bench.engine.elementwise`."""
