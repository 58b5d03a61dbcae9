"""TCP links between the members of an elastic job: handshake, frames, membership, the directory."""
