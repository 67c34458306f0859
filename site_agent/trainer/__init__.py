"""The process that reads patients: isolated, with torch, asked by the gateway over a Unix socket.

Imports ``wardround``, ``fl_algorithms`` and, behind ``requests``, torch; no network library and nothing of the gateway.
Refuses every request that is not of ``wardround.records.trainer``, and data that nobody approved.
"""
