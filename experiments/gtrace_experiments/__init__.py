"""Experiments of the papers in miniature, and ZipML's linear models at low precision: two commands for gtrace.

This module is imported whenever ``gtrace --help`` lists the commands, so it imports nothing. A command is a pair: the
module that defines it as ``command``, and its line in the help.
"""

__version__ = "0.1.0"

REPRODUCE = ("gtrace_experiments.reproduce.command", "Repeat experiments of the papers in miniature.")
LINEAR = ("gtrace_experiments.linear_command", "Train linear models at low precision, end to end.")
