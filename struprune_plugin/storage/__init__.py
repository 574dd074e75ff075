"""Files on disk: manifest, output folder, resume store, source checkpoint."""
