"""The sites' half of the methods: one file each, built from the hooks of ``algorithm``."""
