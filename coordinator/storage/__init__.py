"""What the coordinator keeps: the database with its migrations, and the files of models and updates.

Imports ``wardround`` alone. What it says is stored is durable.
"""
