"""The only door. Keys, consent, the ledger and the one connection; no torch, no data, no private module."""
