"""Checks from outside whether runs are alive, and sends messages if they are not."""
