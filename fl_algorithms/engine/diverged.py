"""A training that left the finite numbers. No torch."""

from wardround.errors import BadData


class Diverged(BadData):
    """A loss is nan or infinite, so that no further step makes sense."""
