"""What a site keeps of a study: the private state after each round, and the checkpoints.

Imports ``wardround`` and where the data lies; no torch. Refuses a state or model that is not bit for bit what was kept.
"""
