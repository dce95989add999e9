"""The backends, which compute a step on a device. Read `interface.py` first; `select.py` chooses one."""
