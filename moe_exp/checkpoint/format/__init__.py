"""Reads and writes a checkpoint's files in one process."""
