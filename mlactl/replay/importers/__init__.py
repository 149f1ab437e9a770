"""Other tools' recordings of MLA calls, turned into captures where they hold enough."""
