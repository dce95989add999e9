"""What stands for Kubernetes in tests of the autoscaler."""
