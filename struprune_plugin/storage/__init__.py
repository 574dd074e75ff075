"""Files on disk: manifest, output folder, digests, resume store, source checkpoint."""
