"""Episodes of many threads over any engine: chat tokens, tools, threads, effects, rewards.

No torch and no engine is imported here; `octopus_trl.protocols` says what an engine must do.
"""
