"""Running a user's torch program: the launcher, the hooks into training, and the names of parameters.

``launcher`` and ``imports`` never import torch: the user's script may set up its environment before it does.
"""
