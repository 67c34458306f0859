"""Tables: one CSV file for each hospital, columns of numbers and of categories.

Reading and encoding import no torch. Refuses a cell with its line and column.
"""
