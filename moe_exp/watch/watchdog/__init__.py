"""Whether runs are alive, looked at from outside, and messages when they are not."""
