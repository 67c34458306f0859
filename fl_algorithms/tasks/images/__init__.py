"""Images: files of pixels, labels and masks; classification and segmentation.

The readers import no torch. Refuses a foreign file with a sentence that names it.
"""
