"""The networks. Each is built from its settings and its numbers of inputs and outputs, and gives logits."""
