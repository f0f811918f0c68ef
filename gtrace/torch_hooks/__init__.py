"""Runs a user's torch program: the launcher, the hooks into training, and the names of parameters.

``launcher``, ``children`` and ``processes`` never import torch: the user's script may set up its environment first.
"""
