"""lrq-ha: a sidecar that gives stock RabbitMQ brokers HA pairs, multi-site log replication and a Spark pipeline."""

__version__ = "0.1.0"
