"""What a study file may say about tasks, networks and methods. Importing this needs no torch."""
