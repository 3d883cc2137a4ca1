"""Checks from outside whether runs make progress, and sends alerts if they do not."""
