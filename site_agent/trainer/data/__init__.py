"""Where a hospital's data is, and whether it is still what a person named.

Imports no torch. Its paths never leave the hospital.
"""
