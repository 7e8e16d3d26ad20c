"""Devices, memory, loading, launching and timing: the room that executes what the others only describe."""
