"""From a call to its plan: checks, the rule, prepared calls, torch ops."""
