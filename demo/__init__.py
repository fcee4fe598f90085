"""Demonstrations of kvbridge on one machine, with synthetic or real engines."""
