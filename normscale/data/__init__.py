"""Corpora as bytes, on Hugging Face `datasets`, and the batches a run draws from them."""
