"""What volumes need beyond images: DICOM series as one, voxels of one spacing, pieces and how they are put together.

Imports numpy, torch and pydicom where a function needs it; refuses whatever does not say where it lies.
"""
