"""Other systems, measured in the same run with the same bytes: what a round costs for their users today."""
