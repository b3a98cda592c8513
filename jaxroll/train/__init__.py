"""The imperative shell around pure agents: dispatch, evaluation, checkpoints, logs, signals.

`__init__.pyi` lists the public names.
"""

from jaxroll._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
