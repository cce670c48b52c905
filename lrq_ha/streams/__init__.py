"""Reading of streams over AMQP 0-9-1, for the receiver and for Spark."""
