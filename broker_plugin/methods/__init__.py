"""The handling of each AMQP method."""
