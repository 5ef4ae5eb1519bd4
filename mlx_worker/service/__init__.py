"""The worker as a background service of its user: launchd on a Mac, systemd on Linux; its menu."""
