"""A Flower app that moves a model down and up and does nothing else. It runs in Flower's environment, not in ours."""
