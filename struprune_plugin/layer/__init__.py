"""One decoder layer and what flows through it; nothing here knows the host's sessions. Read ``prune.py`` first."""
