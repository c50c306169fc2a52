"""From a plan to who computes it and when: passes from plans or tables to tables, by NumPy alone, for every backend."""
