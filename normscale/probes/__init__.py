"""Probes: small classes on a schedule that measure a run and never change it."""
