"""The replicated log as this node has it."""
