"""The thread that moves bytes: it takes orders from the exchange and reports to it."""
