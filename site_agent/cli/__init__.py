"""The commands of a hospital. Each prints; none decides.

Imports torch nowhere. Speaks to the running service over its Unix socket, or takes the state directory's lock.
"""
