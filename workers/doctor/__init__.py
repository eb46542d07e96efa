"""`capsule doctor`: checks this machine, its settings, and what they name."""
