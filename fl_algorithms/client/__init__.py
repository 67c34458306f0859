"""What the methods do at a site: one file each, built from the hooks of ``algorithm``."""
