"""What the coordinator keeps: tables, the database with its migration, and the files of models and updates.

Imports ``wardround`` alone. What it says is stored is durable; a damaged or failed store is named, never guessed at.
"""
