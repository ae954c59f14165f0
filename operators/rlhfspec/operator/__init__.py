"""The operator: RLHFJobs into pods, and what happens to them into conditions."""
