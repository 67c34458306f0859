"""The commands of whoever runs the coordinator. Each asks and prints; none decides.

Imports ``wardround.cli`` and, inside a command alone, the requests and answers and whatever else that command needs.
Refuses pydantic, gRPC, the database and numpy at import: help answers at once.
"""
