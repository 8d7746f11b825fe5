"""Bound ids: those outside their table become the row that its policy names, and are counted by feature.

On a GPU alone: on a CPU routing finds such ids as it goes. The counts stay on the device, to be read along with
whatever the host has to know anyway.
"""
