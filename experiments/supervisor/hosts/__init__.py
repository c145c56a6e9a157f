"""Connects the supervisors of several hosts, over sockets."""
