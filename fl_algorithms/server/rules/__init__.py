"""The rules of [aggregation]: what stands in place of the weighted mean of a round's updates, one file a paper.

Imports numpy and the records of a study. Refuses torch, and a method by its name.
"""
