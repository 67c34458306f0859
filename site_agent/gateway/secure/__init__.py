"""Secure aggregation at a site: keys, shares, the masked vector, its one signature a round, and the check of each sum.

``wardround.secure`` judges; here is what is made durable, written into the ledger, and told, in this order. Imports
``site_agent.gateway.exit`` and the connection. Refuses to send anything that the ledger does not hold.
"""
