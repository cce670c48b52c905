"""What operators set at a broker with its management API: vhosts, users, permissions, policies, parameters."""
