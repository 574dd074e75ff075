"""What a run will leave, take and need, told from a model's configuration before anything is calibrated."""
