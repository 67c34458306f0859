"""The evidence pack of a study: one signed archive that a data protection impact assessment can cite.

May import the rest of ``site_agent.audit``, the policy's and the consents' words, and ``wardround``. Refuses a ledger
that was changed: of that nothing is known to be true. Nothing in a pack is a patient's.
"""
