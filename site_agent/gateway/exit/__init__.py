"""The one exit: policy, the gateway's own copy, the ledger, and the sending of what the ledger holds.

Imports ``site_agent.state`` and the connection. Nothing is sent that has no line in the ledger.
"""
