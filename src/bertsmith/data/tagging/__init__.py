"""Sentences whose words have tags: read, written in one scheme, cut into windows, packed."""
