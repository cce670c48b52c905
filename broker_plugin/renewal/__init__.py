"""Moves live queues into the log again, so that a node can join whose log would have a hole (R17)."""
