"""What the coordinator and the site agent would otherwise write twice: the contract between them."""

__version__ = "0.1.0"
