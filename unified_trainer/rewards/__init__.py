"""Scorers, of which a reward is made, and the hacking monitor.

A scorer is any callable of videos and prompts that returns one number per sample (base.py). A new kind of scorer is one
file in this folder with a module-level `ScorerKind`, and its name in scorers.py.
"""
