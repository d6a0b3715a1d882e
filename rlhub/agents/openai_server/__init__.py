"""An OpenAI-compatible endpoint over any episode engine, which records what agents sample through it as tokens."""
