"""The methods, each one file that reads like its paper; the networks, the tasks, and the lab that compares them."""
