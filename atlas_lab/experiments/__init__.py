"""Experiments from YAML: variants of one model, correct first, then timed, then compared; and our own figures."""
