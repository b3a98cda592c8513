"""jaxroll: JAX-native functional rollouts."""
