"""Torchvision's names, which SGLang imports for models that see."""

from stand_in import attributes, with_submodules

__version__ = "0.28.0"
__getattr__ = attributes(__name__)
with_submodules(__name__)
