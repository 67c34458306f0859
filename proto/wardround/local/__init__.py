"""This machine: durable files, framed messages on a Unix socket, a signal-safe event.

Imports ``wardround.errors`` alone. Refuses what another user could have laid there.
"""
