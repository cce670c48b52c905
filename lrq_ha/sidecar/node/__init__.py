"""One incarnation of this node: its core, its log, its recovery."""
