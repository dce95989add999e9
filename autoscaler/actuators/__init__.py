"""Where replicas live: local processes, Docker Engine, Kubernetes."""
