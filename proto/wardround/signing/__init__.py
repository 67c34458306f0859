"""What is hashed and signed: canonical JSON, DSSE envelopes, certificates.

Imports ``wardround.errors`` and ``wardround.local`` alone. Refuses what has two spellings, and every key or name of a
wrong form.
"""
