"""What tests of the monitoring need: a real Prometheus."""
