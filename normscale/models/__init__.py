"""The Transformers that schemes are tried on."""
