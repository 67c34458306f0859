"""This machine: durable files, framed messages on a Unix socket, a signal-safe event, a rate limit.

Imports ``wardround.errors`` alone. Refuses what another user could have laid there.
"""
