"""Who the members are: the certificate authority, invitations, and which certificates are good now.

Imports ``coordinator.storage``. Refuses whoever is not enrolled, was revoked, or holds a superseded certificate.
"""
