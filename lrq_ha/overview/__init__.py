"""The view of a group: its nodes are asked over HTTP and shown as tables. `lrq-ha list` and the page of a sidecar share it."""
