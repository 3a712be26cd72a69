"""Fakes and shared suites for tests; nothing else imports them."""
