"""Elastic jobs (`on_failure="continue"`): the members may die, leave, come back and be replaced."""
