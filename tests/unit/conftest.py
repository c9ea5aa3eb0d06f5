"""Shared by the unit tests: hypothesis counts no seconds, which a busy machine has too few of."""

from hypothesis import settings

settings.register_profile("bigbatch", parent=settings.get_profile(settings.get_current_profile_name()), deadline=None)
settings.load_profile("bigbatch")
