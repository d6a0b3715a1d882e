"""A stand-in for the library, of which it has what rlhub uses; tests/integration/test_verifiers.py has the real one."""
