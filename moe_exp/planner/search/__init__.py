"""The layouts that a search tries, and the best of them. No torch."""
