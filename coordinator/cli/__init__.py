"""The commands of whoever runs the coordinator. Each asks and prints; none decides.

Imports ``coordinator.requests`` and the answers, and the rest only inside a command. Refuses gRPC, the
database and numpy at import: help answers at once.
"""
