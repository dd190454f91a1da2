"""Questions whose answers stand in a text: read, checked, cut into windows."""
