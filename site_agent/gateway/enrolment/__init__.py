"""The site's keys and certificate: join, renewal, and the rollover of its ledger.

Imports the exit's ledger and the connection. A key is made here and never leaves.
"""
