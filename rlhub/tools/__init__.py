"""Tools that a model may call: lifecycle, schemas, the formats calls are written in, and the tools that come with rlhub."""
