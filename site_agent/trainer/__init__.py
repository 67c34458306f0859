"""The half of a site that sees patients and has no network: torch, the data, the private modules, the checkpoints."""

KINDS = ("best_local", "fine_tuned", "latest", "best_global")  # of checkpoints
