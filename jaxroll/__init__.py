"""jaxroll: rollouts, advantages and minibatches as parts that live inside your own jit.

`__init__.pyi` lists the public names. A name loads when it is first used, so that `import jaxroll`
costs next to nothing and touches no device. See the README for the conventions (axes, truncation,
keys, logical actors).
"""

from jaxroll._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
