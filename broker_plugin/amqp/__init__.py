"""Bytes and connections of AMQP 0-9-1. Nothing here knows the log."""
