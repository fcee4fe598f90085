"""The routes from one engine's blocks into another's: a folder for each that has a protocol of its own.

`receiving.py` and `sending.py` are its halves of the exchange: what a claim carries, what its messages and the data
plane's reports mean, and when a transfer is over. Beside them is what they keep (read leases, slots), and the jobs for
the data plane's thread. Every route through slots has a file besides: how its slots are opened and written. choice.py
chooses among all routes, and proves those through slots.
"""
