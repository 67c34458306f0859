"""A model as files that need nothing of ours: its network as plain PyTorch or ONNX, its rows' encoding, its card.

``predict`` is copied as it stands and imports torch alone; ``files``, ``page`` and ``card`` import no torch. Refuses a
network whose graph cannot be written down whole: its weights are then exported without a program.
"""
