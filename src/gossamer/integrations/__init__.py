"""Gossip inside the training frameworks that people use: one module per framework, imported when it is used."""
