"""The least configuration of a node, for tests that read one."""

MINIMAL = """\
[node]
name = "e1"
id = 1
group = "east"
[broker]
url = "amqp://lrq:secret@127.0.0.1:5672"
[door]
listen = "127.0.0.1:5673"
[http]
listen = "127.0.0.1:8080"
"""
