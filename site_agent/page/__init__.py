"""The hospital's page, on this machine only: what left, what waits, and the decisions of people who log in.

Imports the words of consents, ``site_agent.audit`` for the ledger's lines, and ``wardround.web``. A process of its own:
what it decides goes to the agent's command socket. Refuses gRPC, torch, every key and every way out of the hospital.
"""
