"""Summary statistics of the sites' tables: what a coordinator's operator asks, and the figures that a site tells.

Imports ``wardround`` alone. No word of a hospital's table is in a site's figures: they are numbers, in the order of the
request.
"""
