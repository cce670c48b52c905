"""Coordination by etcd: the client, and a group's register in it."""
