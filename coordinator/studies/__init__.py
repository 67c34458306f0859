"""The studies: their life as a pure state machine, and the one thread that owns them.

Imports updates, models and storage. A fault of one study pauses that study and no other.
"""
