"""The name of :mod:`gtrace.training` in earlier versions."""

import sys

from gtrace import training

sys.modules[__name__] = training
