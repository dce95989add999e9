"""GPUs of one machine: which there are, which of them a replica gets, and the RDMA ports beside them.

Read `placement.py` first.
"""
