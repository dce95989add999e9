"""Steps with and without fused kernels or CUDA graphs, on a CUDA device: `python -m bench.engine.cuda_steps`."""
