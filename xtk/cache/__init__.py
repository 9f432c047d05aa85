"""Teacher caches: folders of Arrow shards with a manifest; see docs/reference/artifacts.md."""
