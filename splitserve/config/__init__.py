"""Settings of all components. Read `base.py` first; `command_line.py` derives the options from the declarations."""
