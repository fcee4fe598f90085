"""Engines that are none, for seeing the bridge carry real bytes on one machine."""
