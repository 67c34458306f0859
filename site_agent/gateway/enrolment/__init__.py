"""The site's keys and certificate: join, renewal, and the rollover of its ledger.

Imports the connection and the exit, whose ledger has a line of each certificate. A key is made here and never leaves;
a certificate of another name, key or authority is refused.
"""
