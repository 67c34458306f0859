"""What lies in a site's state directory, and who asks for it.

Imports ``wardround`` alone. Refuses a damaged file by its name.
"""
