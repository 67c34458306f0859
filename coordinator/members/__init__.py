"""Who the members are: the certificate authority, invitations, and which certificates are valid now.

Imports ``coordinator.storage``. Refuses whoever is not enrolled or was revoked, and certificates that are out of date.
"""
