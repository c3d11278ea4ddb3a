"""Scorers: functions of videos and prompts that a reward is made of."""
