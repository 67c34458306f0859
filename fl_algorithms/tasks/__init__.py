"""What hospitals train: reading and checking their data, the split, the loss, the scores."""
