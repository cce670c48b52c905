"""State of one client connection. Nothing here decides."""
