"""The coordinator: admits, routes and resumes requests. Tokens flow through it; KV does not.

Read `request_flow.py` first: the life of a request on one screen.
"""
