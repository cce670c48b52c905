"""The links to the other nodes of the group."""
