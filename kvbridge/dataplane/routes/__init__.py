"""The routes from one engine's blocks into another's, one file each. choice.py chooses among them.

`why_not` names the reason why two agents cannot use a route, as far as their cards tell. On a `SlotRoute` the sender
opens the receiver's slots, proves that it reaches them, writes chunks to them and closes them. On `pull` the receiver
reads.
"""
