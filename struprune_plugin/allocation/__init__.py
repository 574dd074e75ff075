"""How many units each module keeps."""
