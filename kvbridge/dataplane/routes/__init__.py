"""The ways from one engine's blocks into another's, each in a file of its own. choice.py chooses among them.

A route says what stands `against` it as far as two agents' cards can tell. On one that is `Staged` the sender opens the
receiver's slots, proves that it reaches them, carries chunks to them and closes them. On `pull` the receiver reads.
"""
