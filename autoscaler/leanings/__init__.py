"""What the coordinators' planners may do between two plans, and what is made of it. Read `side_room.py` first."""
