"""The commands of whoever runs the coordinator. Each prints; none decides.

Imports ``coordinator.administration``, and the service only to start it. Loads no gRPC and no database for help.
"""
