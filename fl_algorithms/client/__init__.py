"""What the methods do at a site: one file each, built from the hooks of ``algorithm``; and a site's rounds.

Imports torch, tasks and settings. Refuses a download or a kept state whose tensors are not those of the study.
"""
