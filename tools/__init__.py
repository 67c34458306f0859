"""What developers and make run; no part of the distribution."""
