"""From the log to the queues of the own broker."""
