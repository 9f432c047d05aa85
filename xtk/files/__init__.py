"""Files and folders: atomic writes, locks, claims of outputs, local and remote storage."""
