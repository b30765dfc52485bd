"""What every test runs under."""

from hypothesis import settings

# Machines that run the tests are shared and noisy: time says nothing about a single example.
settings.register_profile("commlib", deadline=None, derandomize=True)
settings.load_profile("commlib")
