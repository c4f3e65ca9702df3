"""``octavo bench prefill`` and ``octavo bench decode``: an engine's steps against their floor and against baselines."""
