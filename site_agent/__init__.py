"""The program a hospital installs: a gateway that has the network and no patients, a trainer that has patients and no
network, and the commands that a person gives them."""
