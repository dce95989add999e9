"""Tickets, layouts, reservations and the transports that move KV blocks between workers."""
