"""Generated from protos/splitserve/kserve: the Open Inference Protocol, package `inference`."""
