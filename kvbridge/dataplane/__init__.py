"""The thread that moves bytes: it has orders from the exchange, and reports to it."""
