"""The program a hospital installs: a gateway, a trainer, the commands that a person gives them, and the audit.

The gateway has the network and no patients, the trainer has patients and no network. Imports ``wardround``; the trainer
alone imports ``fl_algorithms`` and torch. Nothing here imports the coordinator.
"""
