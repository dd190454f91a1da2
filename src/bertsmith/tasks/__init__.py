"""Kinds of task, and what a user can say about them; see `kind`."""
