"""A federation in one process, to compare methods before a hospital is asked."""
