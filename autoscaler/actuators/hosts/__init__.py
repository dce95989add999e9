"""Several Docker hosts under one autoscaler. Read `hosts_actuator.py` first: one actuator over those of the hosts."""
