"""What a run needs to go on, safe on disk: committed whole, verified before use, never pickled."""
