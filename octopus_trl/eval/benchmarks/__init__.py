"""Questions with gold answers, from the hub, from files, or from a user's folder."""
