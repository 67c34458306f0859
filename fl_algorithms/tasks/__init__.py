"""What hospitals train: reading and checking their data, the split, the loss, the scores.

Imports torch and settings, no method. Refuses a hospital's file with its name, line and column, and never with a value.
"""
