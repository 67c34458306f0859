"""Which person is behind a command at a site: ``wardround.local.person``, which the coordinator shares."""

from wardround.local.person import Account, KnownPerson, Person, behind, user_name, who

__all__ = ["Account", "KnownPerson", "Person", "behind", "user_name", "who"]
