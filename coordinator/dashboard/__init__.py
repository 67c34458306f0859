"""The dashboard: pages that an operator reads in a browser. A process of its own, which only asks the running service.

Imports ``coordinator.requests``, ``coordinator.answers``, the page of a study's report, and ``wardround.web``. Refuses
gRPC, the database, and every request that changes something.
"""
