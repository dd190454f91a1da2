"""Rows with a text or a pair of them: the form of most tables. One answer a row, or one vector."""
