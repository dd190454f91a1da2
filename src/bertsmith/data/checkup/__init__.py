"""Looking data over: every check reads on after what it finds, and keeps hashes, not texts."""
