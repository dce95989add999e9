"""The monitoring of compose/monitoring: `dashboards` writes Grafana's JSON from the panels, `prometheus` gets a
Prometheus for tests."""
