"""Compares queue lengths, and counts the messages that the log does not have."""
