"""Layers with the arguments of Tutel and FastMoE, computed by moesaic in one process."""
