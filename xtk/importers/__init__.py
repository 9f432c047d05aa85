"""Teacher caches from and for other tools, and answers of services."""
