"""How the core names a queue."""

QueueKey = tuple[str, str]  # vhost, queue
