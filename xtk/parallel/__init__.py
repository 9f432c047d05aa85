"""Processes and devices of a run: groups, layouts, launch, sharding, copies between host and GPU."""
