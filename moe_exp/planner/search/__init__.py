"""Search for the fastest parallel layout. No torch."""
