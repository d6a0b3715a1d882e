"""Generation with a Hugging Face model in this process: no extra dependency, right for small models and CPU runs."""
