"""The operation core of OpenEngineAdmin: states, planner, executor, recovery; knows no engine and no wire."""
