"""The routes from one engine's blocks into another's: a folder for each that has a protocol of its own.

`halves.py` in each has both its halves of the exchange: what a claim carries, what its messages and the data plane's
reports mean, when a transfer is over, and what they keep of it. Beside it are the jobs for the data plane's thread.
registry.py lists the halves of all routes. slot_routes.py says how slots are opened and written by each route through
them. choice.py chooses among all routes, and proves those through slots.
"""
