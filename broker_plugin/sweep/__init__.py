"""Removes from a backup's queues the messages that the primary's clients took."""
