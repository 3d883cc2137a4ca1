"""Search for the fastest parallel layout. Does not import torch."""
