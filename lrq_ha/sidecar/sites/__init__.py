"""The sessions with other sites."""
