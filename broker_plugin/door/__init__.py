"""Listening, login, dispatch, and the connections of other nodes."""
