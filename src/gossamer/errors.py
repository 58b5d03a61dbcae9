"""The exceptions and warnings a user can meet. No layer of its own: every layer may import it."""


class GossamerError(Exception):
    """Base of all errors that Gossamer raises on purpose; the command line prints it as one sentence."""


class InputError(GossamerError, ValueError):
    """A value a user passed is wrong. The message names the value, the rule and the remedy."""


class GossamerWarning(UserWarning):
    """Something that works but is probably not what the user meant."""
