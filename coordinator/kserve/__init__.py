"""The Open Inference Protocol (KServe v2, as Triton speaks it) on top of the front door."""
