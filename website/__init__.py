"""What builds the documentation site; mkdocs.yml names the hooks."""
