"""Calls over pools of states."""
