"""Supervisors of several hosts, which talk over sockets."""
