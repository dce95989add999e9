"""Who may have how much of what several models share: pure functions of what all of them have and claim."""
