"""Engine `vllm` of splitserve beside vLLM itself, on the same cores; see `main.py`."""
