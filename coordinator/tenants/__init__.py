"""Authentication, permissions and quotas of tenants. Read `access_control.py` first."""
